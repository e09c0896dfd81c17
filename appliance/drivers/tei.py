"""One replica over gRPC: raw bytes in and out, how many texts it holds, and whether it is connected and proved.

Options (measured, grpcio 1.85): with defaults a channel came back 6 s after its port re-opened, with these at once;
a channel whose peer was killed goes READY -> IDLE and stays there until somebody asks it to connect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from appliance.core.routing import Replica

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    # A stream that finds its connection lost must not go out on a new one by itself: nobody has looked who listens now.
    ("grpc.enable_retries", 0),
    # Replicas of equal address (a port used again) must not share a connection with a predecessor.
    ("grpc.use_local_subchannel_pool", 1),
    # Replies come from our own child process; its own limits apply, ours are enforced towards the client.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
CONNECTED_POLL_SECS = 0.02
ABANDONED_SECS = 10.0  # so long after a call was given up its replica may die of it
MOST_ABANDONED = 64
FACTORY = {
    (False, False): "unary_unary",
    (True, True): "stream_stream",
    (True, False): "stream_unary",
}


class Backend:
    """The connection to one replica. Thread-safe.

    proved() says whether the replica itself listens on its port; on_change() is called when `ready` changes.
    """

    def __init__(self, replica: Replica, proved: Callable[[], bool], on_change: Callable[[], None]) -> None:
        self.replica = replica
        self.proved = proved
        self.outstanding = 0  # texts sent and not yet answered
        self.ready = False
        self.is_connected = False  # the channel, to whomever
        self.is_cut = False
        self.abandoned: dict[
            bytes, tuple[str, float, bool]
        ] = {}  # digest of a call -> method, when, and if it was alone
        self.width: int | None = None  # of its vectors, as its process gave the first
        self.on_change = on_change
        self.lock = threading.Lock()
        self.ready_at = float("-inf")  # when it was last seen to be ready; time.monotonic()
        self.generation = 0  # how often the channel has connected
        self.least_generation = 0  # that a new stream may have: the one before has broken
        self.channel = grpc.insecure_channel(replica.address, options=CHANNEL_OPTIONS)
        self.calls: dict[tuple[str, bool, bool], Any] = {}
        self.channel.subscribe(self.observe, try_to_connect=True)

    def observe(self, state: grpc.ChannelConnectivity) -> None:
        self.is_connected = state is grpc.ChannelConnectivity.READY
        self.generation += self.is_connected
        self.become(self.is_connected and self.proved())

    def lost(self, generation: int) -> None:
        """A stream of this generation has lost its connection, of which the channel may tell a moment later."""
        with self.lock:
            self.least_generation = max(self.least_generation, generation + 1)

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

    def connected(self, within_secs: float) -> bool:
        """Whether the channel is there for a stream, and the replica at its other end; waits for it to connect."""
        patience = time.monotonic() + within_secs
        self.wake()
        while not self.is_cut and not (self.is_connected and self.generation >= self.least_generation):
            if time.monotonic() > patience:  # a change and back between two looks of grpc's is told by nobody
                break
            time.sleep(CONNECTED_POLL_SECS)
        return self.is_connected and not self.is_cut and self.proved()

    def wake(self) -> None:
        """Ask an unconnected channel to connect; it does not do so by itself without calls."""
        if not (self.is_connected and self.ready) and not self.is_cut:
            self.channel.unsubscribe(self.observe)
            self.channel.subscribe(self.observe, try_to_connect=True)

    def method(self, path: str, many_requests: bool = False, many_replies: bool = False) -> Any:
        """The multi-callable for ``path``, with bytes as requests and replies."""
        key = (path, many_requests, many_replies)
        if key not in self.calls:
            self.calls[key] = getattr(self.channel, FACTORY[many_requests, many_replies])(path)
        return self.calls[key]

    def abandon(self, digest: bytes, method: str, alone: bool) -> None:
        """A call in work was given up, by its deadline or its caller; the replica may still compute it."""
        with self.lock:
            if len(self.abandoned) >= MOST_ABANDONED:
                del self.abandoned[next(iter(self.abandoned))]
            self.abandoned[digest] = method, time.monotonic(), alone

    def outlived(self) -> list[tuple[bytes, str, bool]]:
        """The calls that were given up lately, and are forgotten now: (digest, method, whether alone)."""
        since = time.monotonic() - ABANDONED_SECS
        with self.lock:
            found, self.abandoned = self.abandoned, {}
        return [(digest, method, alone) for digest, (method, at, alone) in found.items() if at > since]

    def take(self, texts: int) -> None:
        with self.lock:
            self.outstanding += texts

    @contextmanager
    def holding(self, texts: int) -> Iterator[None]:
        """Count ``texts`` as outstanding meanwhile."""
        self.take(texts)
        try:
            yield
        finally:
            self.take(-texts)

    def cut(self) -> None:
        """End all of its calls now: whoever waits for an answer of this replica shall ask another."""
        self.is_cut = True
        self.close()

    def close(self) -> None:
        # Unsubscribed first: a channel closed under its polling thread ends that thread with a traceback.
        self.channel.unsubscribe(self.observe)
        self.channel.close()
