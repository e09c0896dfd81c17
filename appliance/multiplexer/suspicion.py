"""Suspects of one launch of an instance, shared by the threads that call it: `core.suspects` decides."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica
from appliance.core.suspects import CONVICTED_SECS, Standing, Suspects

TRIAL_POLL_SECS = 0.2
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
    """report is called with each conviction.

    deaths: of replicas with one and the same call alone in work, that convict it. One process that sends calls knows
    who else is at a replica; where there are several, a call of another one may have ended it, so it takes two.
    """

    def __init__(self, instance: str, launch: int, report: Report, deaths: int = 1) -> None:
        self.instance = instance
        self.launch = launch
        self.report = report
        self.deaths = deaths
        self.alone: Counter[bytes] = Counter()
        self.suspects = Suspects()
        self.died_with: dict[bytes, list[int]] = {}  # the replicas that a suspect was in work at
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
        self.suspect_digests([digest_of(method, request) for request in requests], replica)

    def suspect_digests(self, digests: list[bytes], replica: Replica) -> None:
        now = time.monotonic()
        with self.lock:
            for digest in digests:
                self.suspects.suspect(digest, now)
                self.died_with.setdefault(digest, []).append(replica.index)
            for digest in self.died_with.keys() - self.suspects.suspected.keys():
                del self.died_with[digest]
                self.alone.pop(digest, None)

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
                self.alone.pop(digest, None)

    def died_alone(self, method: str, digest: bytes, replica: Replica) -> Convicted | None:
        """A replica died with this call alone in work; what it is convicted of, or None where it is tried once more."""
        with self.lock:
            self.alone[digest] += 1
            enough = self.alone[digest] >= self.deaths
        if enough:
            return self.convict_digest(method, digest, replica)
        self.suspect_digests([digest], replica)
        return None

    def convict(self, method: str, request: bytes, replica: Replica) -> Convicted:
        """A replica died with this request, which was alone in work."""
        return self.convict_digest(method, digest_of(method, request), replica)

    def convict_digest(self, method: str, digest: bytes, replica: Replica) -> Convicted:
        with self.lock:
            self.suspects.convict(method, digest, time.monotonic())
            self.alone.pop(digest, None)
            died = [*self.died_with.pop(digest, []), replica.index]
        message = (
            f"A request of {method} (sha256 {digest.hex()[:16]}) ended {len(died)} processes of "
            f'"{self.instance}" (replicas {", ".join(map(str, died))}), the last time alone in work: it is refused for '
            f"{CONVICTED_SECS / 60:.0f} minutes"
        )
        self.report(self.instance, self.launch, died, message)
        return Convicted(message)

    @contextmanager
    def trial(self, until: float, active: Callable[[], bool]) -> Iterator[None]:
        """One suspect at a time. until: of time.monotonic; active: whether the caller is there. Raises: Problem."""
        while not self.one.acquire(timeout=TRIAL_POLL_SECS):
            if active() and time.monotonic() < until:
                continue
            raise Problem(
                Kind.UNAVAILABLE,
                "BACKEND_UNAVAILABLE",
                f'A replica of "{self.instance}" died with this call in work, and it could not be tried again in time',
            )
        try:
            yield
        finally:
            self.one.release()
