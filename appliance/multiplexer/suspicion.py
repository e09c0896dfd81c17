"""Suspects of one launch of an instance, shared by the threads that call it: `core.suspects` decides."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica
from appliance.core.suspects import CONVICTED_SECS, Standing, Suspects

TRIAL_POLL_SECS = 0.2


class Launch(NamedTuple):
    """One launch of an instance: its replicas have the same files and flags."""

    instance: str
    number: int


def launch_of(replica: Replica) -> Launch:
    return Launch(replica.instance, replica.launch)


class Conviction(NamedTuple):
    """What the journal keeps of a convicted call, for the monitor and for people."""

    launch: Launch
    died: list[int]  # the replicas, by index
    message: str


Report = Callable[[Conviction], object]


class Convicted(Problem):
    """Refused, because it ends replicas."""

    def __init__(self, message: str) -> None:
        super().__init__(Kind.INTERNAL, "ENDS_REPLICAS", message)


def digest_of(method: str, request: bytes) -> bytes:
    """method: its unary name, because a stream computes the same."""
    return hashlib.sha256(method.encode() + b"\0" + request).digest()


class Suspicion:
    """report is called with each conviction. Thread-safe.

    deaths: so many replicas have to die with a call alone in work until it is convicted. The only multiplexer of a node
    knows which calls are at a replica; where there are several, a call of another one may have ended it: it takes two.
    """

    def __init__(self, launch: Launch, report: Report, deaths: int = 1) -> None:
        self.launch = launch
        self.instance = launch.instance
        self.report = report
        self.deaths = deaths
        self.deaths_alone: Counter[bytes] = Counter()
        self.suspects = Suspects()
        self.died_with: dict[bytes, list[int]] = {}  # with each suspect: the replicas, by index
        self.lock = threading.Lock()
        self.trial_lock = threading.Lock()

    def standing(self, method: str, request: bytes) -> Standing:
        """Raises: Convicted for what must not reach a replica."""
        if self.suspects.clean:
            return Standing.FREE
        with self.lock:
            standing = self.suspects.standing(method, digest_of(method, request), time.monotonic())
        if standing is Standing.METHOD_REFUSED:
            raise Convicted(
                f'{method} ends the replicas of "{self.instance}": it ended them with two different requests and '
                f"answered none, so it is refused until the instance is restarted; use another method"
            )
        if standing is Standing.CONVICTED:
            raise Convicted(
                f'This request of {method} ended two replicas of "{self.instance}" and is refused for '
                f"{CONVICTED_SECS / 60:.0f} minutes: see GET /events"
            )
        return standing

    def suspect(self, method: str, requests: list[bytes], replica: Replica) -> None:
        """These requests were in work at a replica that died."""
        self.suspect_digests([digest_of(method, request) for request in requests], replica)

    def suspect_digests(self, digests: list[bytes], replica: Replica) -> None:
        now = time.monotonic()
        with self.lock:
            for digest in digests:
                self.suspects.suspect(digest, now)
                self.died_with.setdefault(digest, []).append(replica.index)
            for digest in self.died_with.keys() - self.suspects.suspected.keys():
                del self.died_with[digest]
                self.deaths_alone.pop(digest, None)

    def answered(self, method: str, request: bytes | None = None) -> None:
        """The method has answered. request: that of a suspect, which is acquitted."""
        if request is None and method in self.suspects.answered:
            return
        with self.lock:
            self.suspects.answered.add(method)
            if request is not None:
                digest = digest_of(method, request)
                self.suspects.acquit(digest)
                self.died_with.pop(digest, None)
                self.deaths_alone.pop(digest, None)

    def died_alone(self, method: str, digest: bytes, replica: Replica) -> Convicted | None:
        """A replica died with this call alone in work. Returns its refusal, or None where it is tried once more."""
        with self.lock:
            self.deaths_alone[digest] += 1
            enough = self.deaths_alone[digest] >= self.deaths
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
            self.deaths_alone.pop(digest, None)
            died = [*self.died_with.pop(digest, []), replica.index]
        message = (
            f"A request of {method} (sha256 {digest.hex()[:16]}) ended {len(died)} processes of "
            f'"{self.instance}" (replicas {", ".join(map(str, died))}), the last time alone in work: it is refused for '
            f"{CONVICTED_SECS / 60:.0f} minutes"
        )
        self.report(Conviction(self.launch, died, message))
        return Convicted(message)

    @contextmanager
    def trial(self, until: float, active: Callable[[], bool]) -> Iterator[None]:
        """One suspect at a time. Raises: Problem when it is not its turn in time.

        until: seconds of time.monotonic; active: whether the caller is still there.
        """
        while not self.trial_lock.acquire(timeout=TRIAL_POLL_SECS):
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
            self.trial_lock.release()


class Suspicions:
    """The suspicion of each launch. Read from any thread; `keep_only` is called by one at a time."""

    def __init__(self, report: Report, deaths: int) -> None:
        self.report = report
        self.deaths = deaths
        self.suspicions: dict[Launch, Suspicion] = {}

    def get(self, launch: Launch) -> Suspicion:
        suspicion = self.suspicions.get(launch)
        return suspicion or self.suspicions.setdefault(launch, Suspicion(launch, self.report, self.deaths))

    def keep_only(self, launches: Collection[Launch]) -> None:
        """A launch that is over is not asked about again."""
        self.suspicions = {launch: each for launch, each in self.suspicions.items() if launch in launches}
