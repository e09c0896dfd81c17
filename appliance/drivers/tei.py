"""One replica: whether it is there, and how many texts it holds. Calls have connections of their own (`drivers.http2`).

A channel of grpcio watches the replica's port, because it connects again by itself and tells of each change.

Options (measured, grpcio 1.85): with defaults a channel came back 6 s after its port re-opened, with these at once;
a channel whose peer was killed goes READY -> IDLE and stays there until it is asked to connect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import grpc

from appliance.core.routing import Replica

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    # Replicas of equal address (a port used again) must not share a connection with a predecessor.
    ("grpc.use_local_subchannel_pool", 1),
)
ABANDONED_SECS = 10.0  # so long after a call was given up its replica may die of it
MOST_ABANDONED = 64


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

    proved() says whether the replica itself listens on its port; on_change() is called when `ready` changes.
    """

    def __init__(self, replica: Replica, proved: Callable[[], bool], on_change: Callable[[], None]) -> None:
        self.replica = replica
        self.proved = proved
        self.outstanding = 0  # texts sent and not yet answered
        self.ready = False
        self.is_connected = False  # the channel, to whatever process listens
        self.is_cut = False
        self.abandoned: dict[bytes, AbandonedCall] = {}  # by their digests
        self.width: int | None = None  # of its vectors, as its process gave the first
        self.on_change = on_change
        self.lock = threading.Lock()
        self.ready_at = float("-inf")  # when it was last seen to be ready; time.monotonic()
        self.channel = grpc.insecure_channel(replica.address, options=CHANNEL_OPTIONS)
        self.cancels: set[Callable[[], object]] = set()  # of the streams that are open
        self.channel.subscribe(self.observe, try_to_connect=True)

    def observe(self, state: grpc.ChannelConnectivity) -> None:
        self.is_connected = state is grpc.ChannelConnectivity.READY
        self.become(self.is_connected and self.proved())

    def become(self, ready: bool) -> None:
        if ready or self.ready:
            self.ready_at = time.monotonic()
        if ready != self.ready:
            self.width = None  # it may be another process
            self.ready = ready
            self.on_change()

    def look(self) -> bool:
        """Whether the replica listens at this moment, without waiting for the channel to notice."""
        if not self.is_cut:
            self.become(self.proved())
        return self.ready

    def wake(self) -> None:
        """Ask an unconnected channel to connect; it does not do so by itself without calls."""
        if not (self.is_connected and self.ready) and not self.is_cut:
            self.channel.unsubscribe(self.observe)
            self.channel.subscribe(self.observe, try_to_connect=True)

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

    def take(self, texts: int) -> None:
        with self.lock:
            self.outstanding += texts

    @contextmanager
    def ending_with(self, cancel: Callable[[], object]) -> Iterator[None]:
        """For a stream, which may be open for ever: ``cancel`` is called when the backend is closed meanwhile."""
        with self.lock:
            self.cancels.add(cancel)
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
            cancels = list(self.cancels)
        for cancel in cancels:
            cancel()
        # Unsubscribed first: a channel closed under its polling thread ends that thread with a traceback.
        self.channel.unsubscribe(self.observe)
        self.channel.close()
