"""The channel to one multiplexer process, and whether that process is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from appliance.drivers.grpccalls import deadline_check
from appliance.drivers.http2 import Connection, connected
from appliance.wire.calls import CallFailed, Code, Status, timeout_header
from appliance.wire.methods import MULTIPLEXER

log = logging.getLogger(__name__)
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MOST_IDLE = 64  # connections to one multiplexer process
RECONNECT_POLL_SECS = 0.05
Metadata = Sequence[tuple[str, str]]


class ChannelReply(NamedTuple):
    """metadata: that before the reply, and that behind it."""

    message: bytes
    metadata: dict[str, Any]


class MultiplexerChannel:
    """The channel to one multiplexer process, and whether that process is there.

    The channel's own state is not used: that of a process that was just killed is "ready" for a moment longer, and
    grpcio's own thread that watches it fails when the channel is closed.
    """

    def __init__(self, address: str, options: Sequence[tuple[str, int]], is_lane: bool = False) -> None:
        self.address, self.is_lane = address, is_lane
        self.channel = grpc.insecure_channel(address, options)
        self.idle: list[Connection] = []  # for unary calls, each of which has one to itself
        self.up, self.closed = threading.Event(), threading.Event()
        self.up.set()
        self.callables: dict[tuple[str, str], Any] = {}
        self.lock = threading.Lock()

    @property
    def is_up(self) -> bool:
        return self.up.is_set()

    def mark_lost(self) -> None:
        """The connection has just broken, and with it those that were of the same process."""
        self.drop_idle()
        with self.lock:
            if self.is_up:
                self.up.clear()
                try:
                    threading.Thread(target=self.watch_return, name="return", daemon=True).start()
                except RuntimeError as error:  # the system starts no more threads
                    log.error("Whether %s is back is not looked for: %s", self.address, error)
                    self.up.set()

    def watch_return(self) -> None:
        while not (self.closed.wait(RECONNECT_POLL_SECS) or self.has_returned()):
            pass
        self.up.set()

    def has_returned(self) -> bool:
        """Whether a process answers there, whatever it says; of the lane, which would ask the multiplexer, whether one
        listens."""
        try:
            if self.is_lane:
                connected(self.address, None).close()
            else:
                self.channel.unary_unary(HEALTH_CHECK)(b"", wait_for_ready=True)
        except OSError:
            return False
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        except ValueError:  # it was closed just before
            return True
        return True

    def wait_until_up(self, within_secs: float) -> bool:
        """Whether the process is there in time."""
        return self.up.wait(within_secs)

    def unary(
        self, name: str, request: bytes, metadata: Metadata, longest_secs: float | None, largest: int
    ) -> ChannelReply:
        """On a connection of our own: grpcio's client takes ten times its CPU (`drivers.http2`). Raises: CallFailed."""
        check = deadline_check(longest_secs, "The multiplexer does not answer in time: its log may say why")
        deadline = [] if longest_secs is None else [("grpc-timeout", timeout_header(longest_secs))]
        connection = self.acquire()
        try:
            call = connection.begin(f"/{MULTIPLEXER}/{name}", (request,), [*deadline, *metadata])
            replies = list(connection.replies(call, check))
        finally:
            self.release(connection)
        if len(replies) != 1:
            raise CallFailed(Status(Code.INTERNAL, f"{len(replies)} replies to one request"), answered=False)
        if (size := len(replies[0])) > largest:
            words = f"CLIENT: Received message larger than max ({size} vs. {largest})"
            raise CallFailed(Status(Code.RESOURCE_EXHAUSTED, words), answered=False)
        trailers = call.status.trailers if call.status else ()
        return ChannelReply(replies[0], dict((*call.headers, *trailers)))

    def acquire(self) -> Connection:
        """A living connection. Raises: CallFailed when the process does not listen."""
        while True:
            with self.lock:
                connection = self.idle.pop() if self.idle else None
            if connection is None:
                break
            if connection.fresh():
                return connection
            connection.close()
        try:
            return Connection(self.address)
        except OSError as error:
            words = f"The multiplexer does not listen: {error.strerror or error}"
            raise CallFailed(Status(Code.UNAVAILABLE, words), answered=False, begun=False) from error

    def release(self, connection: Connection) -> None:
        """Keep it, if another call may be made on it."""
        with self.lock:
            if connection.idle and len(self.idle) < MOST_IDLE:
                self.idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """No call may be made afterwards."""
        self.closed.set()
        self.channel.close()
        self.drop_idle()

    def drop_idle(self) -> None:
        with self.lock:
            idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    def callable(self, kind: str, name: str) -> Any:
        """The callable of an RPC that streams. kind: `stream_stream` or `stream_unary`."""
        with self.lock:
            if (kind, name) not in self.callables:
                self.callables[kind, name] = getattr(self.channel, kind)(f"/{MULTIPLEXER}/{name}")
            return self.callables[kind, name]
