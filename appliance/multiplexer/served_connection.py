"""One connection of a client at the unary server, and the plain unary calls on it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from appliance.core.budget import SLOWEST_BYTES
from appliance.files.sockets import keep_alive
from appliance.multiplexer.forwarding import BackendConnection, ForwardedCall
from appliance.wire.calls import Code, framed
from appliance.wire.http2_server import ServerConnection, StreamCancelled, StreamData, StreamOpened
from appliance.wire.served_calls import (
    OK,
    Request,
    only_message,
    reply_headers,
    request_of,
    status_trailers,
    trailers_only,
)

if TYPE_CHECKING:
    from appliance.multiplexer.unary_server import UnaryServer

HANDSHAKE_SECS = 5.0  # from the connection to its first frame
FRAME_SECS = 60.0  # from the beginning of a frame, or of the headers of a call, to its end
LATE_SECS = 1.0  # a message that is not there by then is long on its way
LINGER_SECS = 0.5  # for a client to end its side of the connection, too: it may be sending, and shall read our last
LARGEST_PLAIN = 48 * 1024  # bytes of a message: it fits the window that a client has unasked
MOST_UNREAD = 2**20  # bytes of replies on one connection; with more, its calls have the limits of grpcio's server
MOST_CONTROL = 2**16  # bytes of acknowledgements that a client does not read; then nothing more of it is read
MAPPED = "::ffff:"  # before an IPv4 address, as a socket of IPv6 has it

Metadata = Sequence[tuple[str, str | bytes]]


class ServedCall:
    """A unary call that may be answered here.

    peer: whence, as grpcio writes it. deadline: of time.monotonic; None where there is none. is_active: neither ended
    nor cancelled.
    """

    def __init__(self, connection: ServedConnection, stream: int, request: Request) -> None:
        self.connection, self.stream, self.request, self.peer = connection, stream, request, connection.peer
        self.deadline = None if request.timeout_secs is None else time.monotonic() + request.timeout_secs
        self.body = bytearray()
        self.late: asyncio.TimerHandle | None = None  # while its message arrives
        self.is_active = True
        self.callbacks: list[Callable[[], object]] = []

    def add_callback(self, act: Callable[[], object]) -> bool:
        """Call it when the call has ended; False, and nothing, where it has."""
        if self.is_active:
            self.callbacks.append(act)
        return self.is_active

    def reply(self, headers: Metadata, message: bytes, trailers: Metadata) -> None:
        """Answer with status OK."""
        last = status_trailers(0, "", trailers) if trailers else OK
        self.connection.protocol.reply(self.stream, reply_headers(headers), framed((message,)), last)
        self.connection.answered(self)

    def fail(self, code: int, details: str, trailers: Metadata) -> None:
        """Answer with another status."""
        last = status_trailers(code, details, trailers)
        self.connection.protocol.end_at_once(self.stream, trailers_only(last))
        self.connection.answered(self)

    def forward(self, ended: bool = True) -> None:
        """Let the server behind answer it, if anybody waits for that. ended: the whole request has come."""
        if not self.is_active:
            return
        self.end()
        self.connection.forward(self.stream, self.request, bytes(self.body), ended, self.deadline)

    def end(self) -> None:
        """It is over, or nobody's here any more."""
        self.is_active = False
        if self.late:
            self.late.cancel()
        callbacks, self.callbacks = self.callbacks, []
        for act in callbacks:
            act()


class ServedConnection(asyncio.BufferedProtocol):
    """is_internal: it came through the socket of the data folder."""

    def __init__(self, server: UnaryServer, is_internal: bool) -> None:
        self.server, self.is_internal = server, is_internal
        self.protocol = ServerConnection()
        self.arriving: dict[int, ServedCall] = {}  # whose message is on its way
        self.begun: list[ServedCall] = []  # of those, what came since reading began
        self.running: dict[int, ServedCall] = {}  # whose answer has not gone out whole
        self.forwarded: dict[int, ForwardedCall] = {}
        self.held_up: dict[int, ForwardedCall] = {}  # of those, whose caller does not read
        self.unflushed: dict[int, BackendConnection] = {}  # that were given something since reading began, by stream
        self.born = self.moved_at = time.monotonic()  # moved: when the kernel last took something, or nothing waited
        self.buffered = 0  # bytes for the kernel at the last tick
        self.amid = 0, self.born  # the frames that were finished when another one had begun, and since when
        self.stuck: dict[int, tuple[int, float]] = {}  # streams that wait for the caller: bytes sent, since when
        self.unread = 0  # bytes that have not gone out, as the server counts them
        self.is_reading = False  # what is answered meanwhile goes out afterwards, at once
        self.writing_paused = self.reading_paused = self.is_closing = False
        self.transport: Any = None
        self.peer = "unix:"

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.connections.add(self)
        if not self.is_internal:
            connection = transport.get_extra_info("socket")
            self.peer = peer_name(*transport.get_extra_info("peername")[:2])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):  # it has gone already
                keep_alive(connection)
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closing = True
        self.server.connections.discard(self)
        self.server.unread -= self.unread
        for call in [*self.arriving.values(), *self.running.values()]:
            call.end()
        for forwarded in list(self.forwarded.values()):
            forwarded.cancel()
        self.arriving.clear()
        self.running.clear()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.server.buffer

    def buffer_updated(self, size: int) -> None:
        self.is_reading = True
        for event in self.protocol.receive(bytes(memoryview(self.server.buffer)[:size])):
            if isinstance(event, StreamOpened):
                self.open(event)
            elif isinstance(event, StreamData):
                self.take(event)
            elif isinstance(event, StreamCancelled):
                self.cancel(event.stream)
            else:  # the calls on it end with it
                self.close()
                return
        self.is_reading = False
        unflushed, self.unflushed = self.unflushed, {}
        for backend in unflushed.values():
            backend.flush()
        begun, self.begun = self.begun, []
        for call in begun:
            if call.stream in self.arriving:
                call.late = self.server.loop.call_later(LATE_SECS, call.forward, False)
        self.flush()

    def open(self, event: StreamOpened) -> None:
        request = request_of(event.headers)
        call = ServedCall(self, event.stream, request)
        if not self.server.calls.admit(call):
            return
        is_plain = request.is_plain and not event.ends and self.server.calls.takes(request.path)
        if is_plain and self.waiting() < MOST_UNREAD and self.server.unread < self.server.most_unread:
            self.arriving[event.stream] = call
            self.begun.append(call)
        else:
            self.forward(event.stream, request, b"", event.ends, None)

    def take(self, event: StreamData) -> None:
        if forwarded := self.forwarded.get(event.stream):
            forwarded.send(event.data, event.size, event.ends)
            return
        self.protocol.consumed(event.stream, event.size)
        call = self.arriving.get(event.stream)
        if call is None:
            return
        call.body += event.data
        if event.ends:
            self.answer(call)
        elif len(call.body) > LARGEST_PLAIN:
            call.forward(ended=False)

    def answer(self, call: ServedCall) -> None:
        """Its whole request has come."""
        del self.arriving[call.stream]
        if call.late:
            call.late.cancel()
        message = only_message(call.body)
        if message is None:
            call.forward()
        else:
            self.running[call.stream] = call
            self.server.calls.answer(call, message)

    def forward(self, stream: int, request: Request, body: bytes, ended: bool, deadline: float | None) -> None:
        self.arriving.pop(stream, None)
        self.running.pop(stream, None)
        if stream not in self.protocol.streams:
            return
        if self.server.forwarded < self.server.most_forwarded:
            self.forwarded[stream] = forwarded = ForwardedCall(self, stream)
            forwarded.begin(request, body, ended, deadline)
        else:
            words = "Concurrent RPC limit exceeded!"  # as grpcio has them
            self.protocol.end_at_once(stream, trailers_only(status_trailers(Code.RESOURCE_EXHAUSTED, words, ())))
            self.flush_unless_reading()

    def cancel(self, stream: int) -> None:
        """Nobody waits for its answer any more."""
        if call := self.arriving.pop(stream, None) or self.running.pop(stream, None):
            call.end()
        if forwarded := self.forwarded.get(stream):
            forwarded.cancel()

    # -- sending ------------------------------------------------------------------------------------------------------

    def answered(self, call: ServedCall) -> None:
        """Its answer has been given to the protocol."""
        if call.stream not in self.protocol.streams:
            self.running.pop(call.stream, None)
            call.end()
        self.flush_unless_reading()

    def flush_unless_reading(self) -> None:
        if not self.is_reading:
            self.flush()

    def flush(self) -> None:
        """Send what may be sent, and go on with what waited for that."""
        if self.is_closing:
            return
        while not self.writing_paused and (data := self.protocol.data_to_send()):
            self.transport.write(data)
        self.server.unread -= self.unread
        self.unread = self.waiting()
        self.server.unread += self.unread
        closed, self.protocol.closed = self.protocol.closed, []
        for stream in closed:
            if call := self.running.pop(stream, None):
                call.end()
        for forwarded in list(self.held_up.values()):
            forwarded.look()
        if len(self.protocol.outgoing) > MOST_CONTROL and not self.reading_paused:
            self.reading_paused = True
            self.transport.pause_reading()
        if self.protocol.going_away and not self.protocol.streams and not self.protocol.outgoing:
            self.close()

    def waiting(self) -> int:
        """Bytes that have not gone out."""
        buffered = int(self.transport.get_write_buffer_size())
        return self.protocol.unsent_bytes + len(self.protocol.outgoing) + buffered

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        self.moved_at = time.monotonic()
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()
        self.flush()

    def close(self) -> None:
        """End our side, and the other soon after what is still to go out has done so."""
        if not self.is_closing:
            self.is_closing = True
            self.transport.write(self.protocol.data_to_send())
            self.transport.write_eof()
            self.linger()

    def linger(self) -> None:
        act = self.linger if self.transport.get_write_buffer_size() else self.transport.abort
        self.server.loop.call_later(LINGER_SECS, act)

    def say_goodbye(self) -> None:
        """Have the client connect anew for its next calls; those that run go on."""
        self.protocol.say_goodbye()
        self.flush()

    # -- once a second ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """End what has taken too long."""
        if not self.protocol.greeted and now - self.born > HANDSHAKE_SECS:
            self.transport.abort()
            return
        if self.is_frame_late(now):
            self.transport.abort()
            return
        if self.protocol.goodbye_said and not self.protocol.going_away:  # the client does not answer
            self.protocol.go_away()
            self.flush()
        longest = self.server.longest_connection_secs
        if longest and now - self.born > longest and not self.protocol.goodbye_said:
            self.say_goodbye()
        if allowed := self.server.timeout_secs:
            self.end_unread(now, allowed)

    def is_frame_late(self, now: float) -> bool:
        """Of one that it is not we who do not read."""
        finished, since = self.amid
        if self.reading_paused or not self.protocol.is_amid or self.protocol.finished != finished:
            self.amid = self.protocol.finished, now
            return False
        return now - since > FRAME_SECS

    def end_unread(self, now: float, allowed: float) -> None:
        """End what the caller does not read: a stream of which nothing goes out for so long, or the connection."""
        before, self.buffered = self.buffered, int(self.transport.get_write_buffer_size())
        if not self.buffered or self.buffered < before:
            self.moved_at = now
        elif now - self.moved_at > allowed + self.buffered / SLOWEST_BYTES:
            self.transport.abort()
            return
        known, self.stuck = self.stuck, {}
        if not self.protocol.unsent_bytes:
            return
        for number, stream in list(self.protocol.streams.items()):
            if not (waiting := self.protocol.unsent(number)):
                continue
            sent, since = known.get(number, (-1, now))
            since = since if sent == stream.sent else now
            self.stuck[number] = stream.sent, since
            if now - since > allowed + waiting / SLOWEST_BYTES:
                words = f"The caller does not read its answers: one has waited for {now - since:.3g} s"
                trailers = status_trailers(Code.DEADLINE_EXCEEDED, f"{words} (grpc_request_timeout_secs)", ())
                self.cancel(number)
                self.protocol.end_at_once(number, trailers)
        self.flush()


def peer_name(host: str, port: int) -> str:
    """As grpcio writes it."""
    host = host.removeprefix(MAPPED)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
