"""One call on its way from the unary server to grpcio's server behind, and what comes back.

Frames go on as they come, in both directions, each with the pace of the side that takes them: the caller may send more
when the server behind has taken what came, and that is read no more while the caller does not read.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from appliance.wire.calls import Code, timeout_header
from appliance.wire.envelope import EXPRESS_KEY, EXPRESS_OUTSIDE
from appliance.wire.http2 import (
    ClientConnection,
    DataReceived,
    HeadersReceived,
    ProtocolViolated,
    StreamEvent,
    StreamReset,
)
from appliance.wire.http2_headers import HeaderTuple
from appliance.wire.http2_server import INTERNAL_ERROR, REFUSED_STREAM
from appliance.wire.served_calls import Request, status_trailers, trailers_only

if TYPE_CHECKING:
    from appliance.multiplexer.served_connection import ServedConnection
    from appliance.multiplexer.unary_server import UnaryServer

WINDOW = 2**18  # bytes that a caller may have on its way, once the server behind has taken SHOWN
SHOWN = 2**16
MOST_WAITING = 2**16  # bytes of replies that wait for a caller who does not read
COMMON = {(":method", "POST"), (":scheme", "http")}
MOST_IDLE = 32  # connections that are kept


class BackendConnection(asyncio.Protocol):
    """A connection to the server behind, for one call after the other."""

    def __init__(self, server: UnaryServer) -> None:
        self.server = server
        self.protocol = ClientConnection()
        self.transport: Any = None  # while it connects
        self.call: ForwardedCall | None = None
        self.paused = self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.call is None:  # its caller has gone meanwhile
            transport.abort()
        self.flush()

    def data_received(self, data: bytes) -> None:
        call = self.call
        for event in self.protocol.receive(data):
            if call and not call.over:
                call.take(event)
        self.flush()
        if call:
            call.caller.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self in self.server.idle:
            self.server.idle.remove(self)
        if self.call:
            self.call.lost()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.flush()
        if self.call:
            self.call.caller.flush()

    def flush(self) -> None:
        if self.transport is None:
            return
        while not self.paused and (data := self.protocol.data_to_send()):
            self.transport.write(bytes(data))
        if self.call and not self.paused and not self.protocol.held_back:
            self.call.sent()

    def rest(self) -> None:
        """Its call is over: it is kept for another one, if it can have one."""
        self.call = None
        if self.lost:
            return
        if not self.protocol.reusable or len(self.server.idle) >= MOST_IDLE:
            self.transport.close()
            return
        self.transport.resume_reading()
        self.server.idle.append(self)

    def abort(self) -> None:
        """End it with its call: the server behind sees that its caller has gone."""
        self.call = None
        if self.transport:
            self.transport.abort()


class ForwardedCall:
    """One call. caller: the connection on which it came, as `stream`."""

    def __init__(self, caller: ServedConnection, stream: int) -> None:
        self.caller, self.stream = caller, stream
        caller.server.forwarded += 1
        self.backend = caller.server.backend()
        self.backend.call = self
        self.untaken = self.taken = 0  # bytes that came, and wait to go on; that have gone on
        self.replied = self.paused = self.over = False

    def begin(self, request: Request, body: bytes, ended: bool, deadline: float | None) -> None:
        """body: what has come of the request; ended: all of it. deadline: where time has passed since it came."""
        # The connection is used for others, too: its table gets nothing that a caller can choose.
        own = tuple(pair for pair in request.headers if pair in COMMON)
        others = [pair for pair in request.headers if pair not in COMMON]
        if not self.caller.is_internal:
            # To the server behind all calls come through a socket of the data folder, where the gateway's do.
            others = [pair for pair in others if pair[0] != EXPRESS_KEY]
            others.append((EXPRESS_KEY, EXPRESS_OUTSIDE))
        if deadline is not None:
            others = [pair for pair in others if pair[0] != "grpc-timeout"]
            others.append(("grpc-timeout", timeout_header(deadline - time.monotonic())))
        self.backend.protocol.open(own, others)
        self.send(body, 0, ended)

    def send(self, data: bytes, size: int, ended: bool) -> None:
        """More of the request. size: what the caller's windows have been charged for it."""
        if self.over:
            self.caller.protocol.consumed(self.stream, size)
            return
        self.untaken += size
        self.caller.protocol.consumed(0, size)  # of the connection: what waits here holds up no other call on it
        self.backend.protocol.send(data, ended)
        if self.caller.is_reading:  # more may follow at once: a stream has a frame for each of its messages
            self.caller.unflushed[self.stream] = self.backend
        else:
            self.backend.flush()

    def sent(self) -> None:
        """The server behind has room for more than what came: the caller may go on."""
        if not self.untaken:
            return
        self.caller.protocol.grant(self.stream, self.untaken)
        before, self.taken = self.taken, self.taken + self.untaken
        self.untaken = 0
        if before < SHOWN <= self.taken:
            self.caller.protocol.grant(self.stream, WINDOW)

    def take(self, event: StreamEvent) -> None:
        """What the server behind has answered."""
        protocol = self.caller.protocol
        if isinstance(event, DataReceived):
            protocol.send_data(self.stream, event.data)
            if event.ends:  # no end of a call of gRPC
                protocol.reset(self.stream, INTERNAL_ERROR)
                self.end()
            elif not self.paused and protocol.unsent(self.stream) > MOST_WAITING:
                self.paused = True
                self.caller.held_up[self.stream] = self
                self.backend.transport.pause_reading()
        elif isinstance(event, HeadersReceived):
            self.take_headers(tuple(event.headers), event.ends)
        elif isinstance(event, StreamReset):
            protocol.reset(self.stream, event.error)
            self.end()
        elif isinstance(event, ProtocolViolated):
            self.fail(Code.INTERNAL, event.details)
        else:  # it goes away, and has not looked at the call
            protocol.reset(self.stream, REFUSED_STREAM)
            self.end()

    def take_headers(self, headers: HeaderTuple, ends: bool) -> None:
        protocol = self.caller.protocol
        if not ends:
            self.replied = True
            protocol.send_headers(self.stream, headers)
            return
        if self.replied:
            protocol.end(self.stream, headers)
        else:
            protocol.end_at_once(self.stream, headers)
        self.end()

    def look(self) -> None:
        """The caller, who did not read, may have done so."""
        if self.caller.protocol.unsent(self.stream) <= MOST_WAITING // 2:
            self.paused = False
            del self.caller.held_up[self.stream]
            self.backend.transport.resume_reading()

    def lost(self) -> None:
        """The server behind is gone, or cannot be reached."""
        self.fail(Code.UNAVAILABLE, "The multiplexer is ending, or has ended this connection: try again")
        self.caller.flush()

    def fail(self, code: Code, words: str) -> None:
        trailers = status_trailers(code, words, ())
        if self.replied:
            self.caller.protocol.end(self.stream, trailers)
        else:
            self.caller.protocol.end_at_once(self.stream, trailers_only(trailers))
        self.leave()
        self.backend.abort()

    def end(self) -> None:
        self.leave()
        self.backend.rest()

    def cancel(self) -> None:
        """The caller has gone, or is not waited for any more."""
        if not self.over:
            self.leave()
            self.backend.abort()

    def leave(self) -> None:
        """It is over."""
        self.over = True
        self.caller.server.forwarded -= 1
        self.caller.forwarded.pop(self.stream, None)
        self.caller.held_up.pop(self.stream, None)
