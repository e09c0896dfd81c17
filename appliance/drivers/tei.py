"""One replica: whether it is there, and how many texts it holds.

Calls have connections of their own (`drivers.http2`); whether it is there is watched on another one
(`drivers.reachability`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from appliance.core.routing import Replica
from appliance.wire.tei.v1.tei_pb2 import InfoResponse

ABANDONED_SECS = 10.0  # so long after a call was given up its replica may die of it
MOST_ABANDONED = 64

Observe = Callable[[bool], None]
Watch = Callable[[str, Observe], Callable[[], None]]  # an address, and who is told of it -> what ends the watch


class AbandonedCall(NamedTuple):
    """A call in work that was given up, by its deadline or its caller; the replica may still compute it.

    alone: it had the replica for itself. at: when, of time.monotonic.
    """

    digest: bytes
    method: str
    alone: bool
    at: float


class Backend:
    """One replica as calls see it. Thread-safe.

    proved() says whether the replica itself listens on its port; None for one on another machine, of which only the
    connection tells. on_change() is called when `ready` changes. watch: as `Reachability.watch`.
    """

    def __init__(
        self, replica: Replica, proved: Callable[[], bool] | None, on_change: Callable[[], None], watch: Watch
    ) -> None:
        self.replica = replica
        self.proved = proved
        self.outstanding = 0  # texts sent and not yet answered
        self.taken = 0  # how often it was sent some to compute
        self.ready = False
        self.is_connected = False  # the line that is watched, to whatever process listens
        self.is_cut = False
        self.abandoned: dict[bytes, AbandonedCall] = {}  # by their digests
        self.comings = 0  # how often it became ready: each time it may be another process
        self.takes_packed = True  # streams of `PackedEmbed`, until it refuses one
        self.width: int | None = None  # of its vectors, as its process gave the first
        self.info: InfoResponse | None = None  # what its process says of itself, of one on another machine
        self.is_refuted = False  # what listens there now is another replica
        self.on_change = on_change
        self.lock = threading.Lock()
        self.ready_at = float("-inf")  # when it was last seen to be ready; time.monotonic()
        self.is_closed = False
        self.cancels: set[Callable[[], object]] = set()  # of the streams that are open
        self.unwatch = watch(replica.address, self.observe)

    def observe(self, connected: bool) -> None:
        self.is_connected = connected
        self.is_refuted = False
        self.become(connected and self.is_proved())

    def is_proved(self) -> bool:
        return self.proved() if self.proved else self.is_connected and not self.is_refuted

    def refute(self) -> None:
        """What listens there is not this replica, as it says itself: no call until that has ended."""
        self.is_refuted = True
        self.become(False)

    def become(self, ready: bool) -> None:
        if ready or self.ready:
            self.ready_at = time.monotonic()
        if ready != self.ready:
            self.width = self.info = None  # it may be another process
            self.takes_packed = True
            self.comings += ready
            self.ready = ready
            self.on_change()

    def look(self) -> bool:
        """Whether the replica listens at this moment, without waiting for the line to notice."""
        if not self.is_cut:
            self.become(self.is_proved())
        return self.ready

    def prove_again(self) -> None:
        """Look once more where the line and the proof differ: at one who listens and was not proved, and at what was
        found before the line was there, which cannot tell that it has ended."""
        if self.ready != self.is_connected:
            self.look()

    def abandon(self, digest: bytes, method: str, alone: bool) -> None:
        with self.lock:
            if len(self.abandoned) >= MOST_ABANDONED:
                del self.abandoned[next(iter(self.abandoned))]
            self.abandoned[digest] = AbandonedCall(digest, method, alone, time.monotonic())

    def forget_abandoned(self) -> list[AbandonedCall]:
        """The calls that were abandoned lately; all are forgotten."""
        since = time.monotonic() - ABANDONED_SECS
        with self.lock:
            abandoned, self.abandoned = self.abandoned, {}
        return [call for call in abandoned.values() if call.at > since]

    def take(self, texts: int, is_use: bool = True) -> None:
        """is_use: it is called for what it computes, and not asked what it is."""
        with self.lock:
            self.outstanding += texts
            self.taken += is_use and texts > 0

    @contextmanager
    def ending_with(self, cancel: Callable[[], object]) -> Iterator[None]:
        """For a stream, which may be open for ever: ``cancel`` is called when the backend is closed meanwhile, or was
        closed a moment ago."""
        with self.lock:
            self.cancels.add(cancel)
            is_late = self.is_closed
        if is_late:
            cancel()
        try:
            yield
        finally:
            with self.lock:
                self.cancels.discard(cancel)

    def cut(self) -> None:
        """End all of its streams now: their callers then ask another replica."""
        self.is_cut = True
        self.close()

    def close(self) -> None:
        """Watch it no more, and end its streams."""
        with self.lock:
            self.is_closed = True
            cancels = list(self.cancels)
        for cancel in cancels:
            cancel()
        self.unwatch()
