"""Suspects of one launch of an instance, shared by the threads that call it: `core.suspects` decides."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica
from appliance.core.suspects import CONVICTED_SECS, Standing, Suspects

log = logging.getLogger(__name__)
# (instance, launch, replicas that died, what happened): for the journal, where the monitor and people find it.
Report = Callable[[str, int, list[int], str], None]


class Convicted(Problem):
    """A call that ends replicas."""

    def __init__(self, message: str) -> None:
        super().__init__(Kind.INTERNAL, "ENDS_REPLICAS", message)


def digest_of(method: str, request: bytes) -> bytes:
    """method: its unary name, because a stream computes the same."""
    return hashlib.sha256(method.encode() + b"\0" + request).digest()


class Suspicion:
    """report is called with each conviction."""

    def __init__(self, instance: str, launch: int, report: Report) -> None:
        self.instance = instance
        self.launch = launch
        self.report = report
        self.suspects = Suspects()
        self.died_with: dict[bytes, int] = {}  # the replica that a suspect was first in work at
        self.lock = threading.Lock()
        self.one = threading.Lock()

    def standing(self, method: str, request: bytes) -> Standing:
        """Raises: Convicted for what must not reach a replica."""
        if self.suspects.clean:
            return Standing.FREE
        with self.lock:
            found = self.suspects.standing(method, digest_of(method, request), time.monotonic())
        if found is Standing.METHOD_REFUSED:
            raise Convicted(
                f'{method} ends the replicas of "{self.instance}": it ended them with two different requests and '
                f"answered none, so it is refused until the instance is restarted; use another method"
            )
        if found is Standing.CONVICTED:
            raise Convicted(
                f'This request of {method} ended two replicas of "{self.instance}" and is refused for '
                f"{CONVICTED_SECS / 60:.0f} minutes: see GET /events"
            )
        return found

    def suspect(self, method: str, requests: list[bytes], replica: Replica) -> None:
        """These were in work at a replica that died."""
        now = time.monotonic()
        with self.lock:
            for request in requests:
                digest = digest_of(method, request)
                self.suspects.suspect(digest, now)
                self.died_with[digest] = replica.index

    def answered(self, method: str, request: bytes | None = None) -> None:
        """The method has answered; request: a suspect's."""
        if request is None and method in self.suspects.answered:
            return
        with self.lock:
            self.suspects.answered.add(method)
            if request is not None:
                digest = digest_of(method, request)
                self.suspects.acquit(digest)
                self.died_with.pop(digest, None)

    def convict(self, method: str, request: bytes, replica: Replica) -> Convicted:
        """A replica died with this request, which was alone in work."""
        digest = digest_of(method, request)
        with self.lock:
            self.suspects.convict(method, digest, time.monotonic())
            first = self.died_with.pop(digest, None)
        died = [index for index in (first, replica.index) if index is not None]
        message = (
            f"A {method} request of {len(request)} bytes (sha256 {digest.hex()[:16]}) ended replica(s) "
            f'{", ".join(map(str, died))} of "{self.instance}", the last time alone in work: it is refused for '
            f"{CONVICTED_SECS / 60:.0f} minutes"
        )
        log.error("%s", message)
        self.report(self.instance, self.launch, died, message)
        return Convicted(message)

    @contextmanager
    def trial(self, until: float) -> Iterator[None]:
        """One suspect at a time. until: seconds of time.monotonic. Raises: Problem timeout."""
        if not self.one.acquire(timeout=max(0.0, until - time.monotonic())):
            raise Problem(
                Kind.UNAVAILABLE,
                "BACKEND_UNAVAILABLE",
                f'A replica of "{self.instance}" died with this call in work, and it could not be tried again in time',
            )
        try:
            yield
        finally:
            self.one.release()
