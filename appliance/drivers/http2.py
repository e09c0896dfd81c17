"""gRPC calls over an HTTP/2 connection of one's own: bytes in, bytes out, one call at a time.

Why not grpcio's client: its threads hand every message over, at about 120 microseconds of CPU a message on a stream and
500 a unary call (grpcio 1.85, 2 cores); here a whole slice of requests is one write, and what has arrived is cut into
messages by one loop, at about a tenth of that. A thread that waits for its reply makes two system calls, one that
writes and one that waits and reads: at each of them another thread takes the interpreter, and it has to be given back.
Because a connection carries one call at a time, flow control and cancellation are simple: our windows are never the
limit, and closing the socket is the cancellation.

Protocol: RFC 9113 with prior knowledge, plain text; header blocks are coded by `hpack`. Covered are the frames that a
gRPC server sends: DATA, HEADERS, CONTINUATION, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE.
"""

from __future__ import annotations

import base64
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
LARGEST_WINDOW = 2**31 - 1
TOP_UP = 2**29  # bytes received after which the connection's window is opened again
OUR_FRAME_SIZE = 2**20
READ_BYTES = 2**16  # taken from memory before the wait for them, by each call that waits
WRITE_BYTES = 2**17  # prepared at once; more waits until the socket takes it
CONNECT_SECS = 1.0
FRESH_SECS = 0.05  # so soon after a call nobody looks whether the peer has ended the connection: the call would see it
UNAVAILABLE, INTERNAL, CANCELLED = 14, 13, 1  # gRPC status numbers that the transport itself gives
RESET_CODES = {7: UNAVAILABLE, 8: CANCELLED, 11: 8}  # by HTTP/2 error; gRPC over HTTP/2, "Errors"
LONGEST_HEADERS = 16384

TRANSPORTS_OWN = {"content-type", "trailer", "date", "grpc-encoding", "grpc-accept-encoding"}

Metadata = list[tuple[str, str | bytes]]


class CallFailed(Exception):
    """A call that ended with another status than OK.

    answered: by the server, or only by the transport. begun: the server may have worked on it; False when it was never
    reached.
    """

    def __init__(self, code: int, details: str, trailing: Metadata, answered: bool, begun: bool = True) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing
        self.answered = answered
        self.begun = begun


class Connection:
    """One HTTP/2 connection to ``host:port``. ``idle`` says whether another call may be made on it.

    Raises: OSError when nobody listens.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self.socket = socket.create_connection((host, int(port)), timeout=CONNECT_SECS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(None)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.encoder, self.decoder = Encoder(), Decoder()
        self.incoming = bytearray()
        self.received = 0
        self.window, self.first_window, self.frame_size = 65535, 65535, 16384  # what the peer grants us
        self.next_stream = 1
        self.idle = True
        self.rested_at = 0.0  # when the last call ended; time.monotonic()
        self.alive = True  # until the peer says GOAWAY
        self.greeted = False  # the peer's first SETTINGS have come: it has accepted the connection
        self.current: Exchange | None = None
        self.lock = threading.Lock()
        # Settings: no push, no dynamic header table, the largest windows, large frames.
        settings = struct.pack(">HIHIHIHI", 2, 0, 1, 0, 4, LARGEST_WINDOW, 5, OUR_FRAME_SIZE)
        opening = struct.pack(">I", LARGEST_WINDOW - 65535)
        self.outgoing = bytearray(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, opening))

    def close(self) -> None:
        self.idle = False
        self.socket.close()

    def abort(self, exchange: Exchange) -> None:
        """End a call, from any thread: its own thread sees the end of the connection. Nothing once it is over."""
        with self.lock:
            if self.current is exchange:
                try:
                    self.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    def cut(self) -> None:
        """End whatever runs on the connection, from any thread, as if the peer had died."""
        with self.lock:
            if self.current:
                try:
                    self.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    def fresh(self) -> bool:
        """Whether the connection still lives, after what the peer may have sent since the last call."""
        if time.monotonic() - self.rested_at < FRESH_SECS:
            return self.idle
        try:
            if self.poll.poll(0):
                self.read(None)
        except (OSError, CallFailed):
            self.idle = False
        return self.idle

    # -- one call -----------------------------------------------------------------------------------------------------

    def begin(self, path: str, messages: Sequence[bytes], metadata: Metadata, one_at_a_time: bool = False) -> Exchange:
        """Start a call. one_at_a_time: send each message only when the one before it was answered."""
        exchange = Exchange(self.next_stream, self.first_window, messages, one_at_a_time)
        self.next_stream += 2
        self.idle = False
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self.address)]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        headers += [(key, coded(value)) for key, value in metadata]
        block = self.encoder.encode(headers, huffman=False)
        pieces = [block[at : at + LONGEST_HEADERS] for at in range(0, len(block), LONGEST_HEADERS)]
        for number, piece in enumerate(pieces):
            kind, flags = CONTINUATION if number else HEADERS, END_HEADERS if number == len(pieces) - 1 else 0
            self.outgoing += frame(kind, flags, exchange.stream, piece)
        with self.lock:
            self.current = exchange
        return exchange

    def replies(self, exchange: Exchange, check: Callable[[], float]) -> Iterator[bytes]:
        """The replies of a call in order; afterwards the exchange has its headers and trailers.

        check() is called all the time: it may raise to end the call, and returns the seconds after which it wants to be
        called again, if nothing has arrived by then. Raises: CallFailed for every status but OK.
        """
        try:
            while not exchange.ended:
                failure: Exception | None = None
                try:
                    self.turn(exchange, check)
                except (OSError, CallFailed) as error:
                    failure = error
                yield from exchange.replies()  # also those that came right before the end
                if failure and not exchange.ended:
                    raise failure
        except OSError as error:
            message = f"{error.strerror or error}"
            raise CallFailed(UNAVAILABLE, message, [], answered=False, begun=self.greeted) from error
        finally:
            with self.lock:
                self.current = None
            self.idle = exchange.ended and exchange.all_sent and self.alive
            self.rested_at = time.monotonic()
            if not self.idle:
                self.close()
        exchange.refuse_failure()

    def turn(self, exchange: Exchange, check: Callable[[], float]) -> None:
        """Write what may be written, read what is there; waits for either as long as ``check`` says."""
        self.prepare(exchange)
        while self.outgoing and self.write():
            self.prepare(exchange)
        patience = check()
        if not self.outgoing:
            self.read(exchange, patience)
            return
        self.poll.modify(self.socket, select.POLLIN | select.POLLOUT)
        ready = self.poll.poll(patience * 1000)
        self.poll.modify(self.socket, select.POLLIN)
        for _, events in ready:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self.read(exchange)

    def prepare(self, exchange: Exchange) -> None:
        """Cut waiting request bytes into DATA frames, as far as the peer's windows allow."""
        while len(self.outgoing) < WRITE_BYTES:
            room = min(self.window, exchange.window, self.frame_size)
            piece = exchange.cut(room)
            if piece is None:
                return
            self.window -= len(piece)
            exchange.window -= len(piece)
            flags = END_STREAM if exchange.all_sent else 0
            self.outgoing += frame(DATA, flags, exchange.stream, piece)

    def write(self) -> bool:
        """Whether the socket took something."""
        try:
            sent = self.socket.send(self.outgoing, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        del self.outgoing[:sent]
        return True

    def read(self, exchange: Exchange | None, patience: float = 0.0) -> None:
        """Take what has arrived. patience: seconds to wait for it; one system call does both."""
        if patience:
            microseconds = max(1, math.ceil(patience * 1e6))
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(microseconds, 10**6))
            )
        try:
            chunk = self.socket.recv(READ_BYTES, 0 if patience else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        self.incoming += chunk
        try:
            self.take_frames(exchange)
        except (IndexError, AttributeError, struct.error) as error:
            raise CallFailed(INTERNAL, f"the peer broke the HTTP/2 protocol: {error}", [], answered=False) from error
        if self.received > TOP_UP:
            self.outgoing += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self.received))
            self.received = 0

    def take_frames(self, exchange: Exchange | None) -> None:
        at, incoming = 0, self.incoming
        while len(incoming) - at >= 9:
            length = incoming[at] << 16 | incoming[at + 1] << 8 | incoming[at + 2]
            end = at + 9 + length
            if end > len(incoming):
                break
            stream = int.from_bytes(incoming[at + 5 : at + 9], "big") & LARGEST_WINDOW
            self.take(incoming[at + 3], incoming[at + 4], stream, bytes(incoming[at + 9 : end]), exchange)
            at = end
        del incoming[:at]

    def take(self, kind: int, flags: int, stream: int, payload: bytes, exchange: Exchange | None) -> None:
        """One frame."""
        ours = exchange is not None and stream == exchange.stream
        if kind == DATA:
            self.received += len(payload)
        if kind == DATA and ours and exchange:
            exchange.body += unpadded(flags, payload)
            exchange.ended |= bool(flags & END_STREAM)
        elif kind in (HEADERS, CONTINUATION):
            # Every block must be decoded, whoever it is for: the decoder's state is the connection's.
            if kind == HEADERS:
                self.block = bytearray()
                self.block_ends = bool(flags & END_STREAM)
                payload = unpadded(flags, payload)[5 if flags & PRIORITY else 0 :]
            self.block += payload
            if flags & END_HEADERS:
                self.headers(exchange if ours else None)
        elif kind == SETTINGS and not flags & ACK:
            self.settings(payload, exchange)
        elif kind == PING and not flags & ACK:
            self.outgoing += frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            grant = int.from_bytes(payload, "big") & LARGEST_WINDOW
            if stream == 0:
                self.window += grant
            elif ours and exchange:
                exchange.window += grant
        elif kind == RST_STREAM and ours and exchange:
            # Behind the trailers it only says that the rest of the request is not wanted.
            if not exchange.ended:
                number = int.from_bytes(payload, "big")
                message = f"the stream was reset with HTTP/2 error {number}"
                raise CallFailed(RESET_CODES.get(number, INTERNAL), message, [], answered=False)
        elif kind == GOAWAY:
            self.alive = False
            if exchange is None:
                self.idle = False
            elif int.from_bytes(payload[:4], "big") & LARGEST_WINDOW < exchange.stream and not exchange.ended:
                raise CallFailed(UNAVAILABLE, "the server is going away", [], answered=False, begun=False)

    def headers(self, exchange: Exchange | None) -> None:
        try:
            found = self.decoder.decode(bytes(self.block))
        except HPACKError as error:
            raise CallFailed(INTERNAL, f"unreadable headers: {error}", [], answered=False) from error
        if exchange:
            exchange.take_headers([(str(key), str(value)) for key, value in found], self.block_ends)

    def settings(self, payload: bytes, exchange: Exchange | None) -> None:
        self.greeted = True
        for number, value in struct.iter_unpack(">HI", payload):
            if number == 4:
                if exchange:
                    exchange.window += value - self.first_window
                self.first_window = value
            elif number == 5:
                self.frame_size = min(value, WRITE_BYTES)
            elif number == 1:
                self.encoder.header_table_size = min(value, 4096)
        self.outgoing += frame(SETTINGS, ACK, 0, b"")


class Exchange:
    """One call: what is still to send, what has arrived."""

    def __init__(self, stream: int, window: int, messages: Sequence[bytes], one_at_a_time: bool) -> None:
        self.stream = stream
        self.window = window
        self.later = list(messages) if one_at_a_time else []  # sent one by one, as replies come
        self.waiting = b""
        self.sent = 0  # of `waiting`
        self.all_sent = False
        self.body = bytearray()
        self.answered = 0
        self.ended = False
        self.headers: Metadata = []
        self.trailers: Metadata = []
        self.status: int | None = None
        self.message = ""
        if one_at_a_time:
            self.put_next()
        else:
            self.put(messages)

    def put_next(self) -> None:
        if self.later:
            self.put([self.later.pop(0)])

    def put(self, messages: Sequence[bytes]) -> None:
        framed = [part for message in messages for part in (struct.pack(">BI", 0, len(message)), message)]
        self.waiting = b"".join((self.waiting[self.sent :], *framed))
        self.sent = 0

    def cut(self, room: int) -> bytes | None:
        """The next piece of at most ``room`` bytes; None when nothing is to send or there is no room."""
        left = len(self.waiting) - self.sent
        if self.all_sent or (left == 0 and self.later) or (left and room <= 0):
            return None
        piece = self.waiting[self.sent : self.sent + room]
        self.sent += len(piece)
        self.all_sent = not self.later and self.sent == len(self.waiting)
        return piece

    def replies(self) -> Iterator[bytes]:
        """The complete messages that have arrived."""
        body, at = self.body, 0
        while len(body) - at >= 5:
            end = at + 5 + int.from_bytes(body[at + 1 : at + 5], "big")
            if end > len(body):
                break
            if body[at]:
                raise CallFailed(INTERNAL, "the reply is compressed, which was not offered", [], answered=False)
            self.answered += 1
            self.put_next()
            yield bytes(body[at + 5 : end])
            at = end
        del body[:at]

    def take_headers(self, found: list[tuple[str, str]], ends: bool) -> None:
        for key, value in found:
            if key == "grpc-status":
                self.status = int(value) if value.isdigit() else INTERNAL
            elif key == "grpc-message":
                self.message = unquote(value)
            elif key == ":status" and value != "200":
                self.message = self.message or f"HTTP status {value}"
            elif not key.startswith(":") and key not in TRANSPORTS_OWN:
                (self.trailers if ends else self.headers).append((key, decoded(key, value)))
        self.ended |= ends

    def refuse_failure(self) -> None:
        if self.status is None:
            message = self.message or "the call ended without a status"
            raise CallFailed(UNAVAILABLE, message, self.trailers, answered=False)
        if self.status:
            raise CallFailed(self.status, self.message, self.trailers, answered=True)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def unpadded(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload


def coded(value: str | bytes) -> str:
    """Metadata as a header: binary values (`-bin`) travel as base64."""
    return base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value


def decoded(key: str, value: str) -> str | bytes:
    return base64.b64decode(value + "=" * (-len(value) % 4)) if key.endswith("-bin") else value
