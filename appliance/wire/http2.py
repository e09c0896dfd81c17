"""HTTP/2 without a socket: the client's side of one connection (RFC 9113), as a state machine.

Bytes that have arrived go in, and events come out. What shall be sent is asked for by calls, and collected as bytes:

    connection = ClientConnection()
    connection.open(headers)
    connection.send(body, end=True)
    socket.sendall(connection.data_to_send())
    for event in connection.receive(socket.recv(65536)):
        ...  # HeadersReceived, DataReceived, StreamReset, StreamUnprocessed, ProtocolViolated

It opens no socket, reads no clock and starts no thread: the same bytes give the same events, however they are cut. It
is not thread-safe. After each `receive` there may be something to send, because pings and settings are acknowledged
and windows are opened without being asked.

One stream is open at a time, with prior knowledge and in plain text. That makes two rules simple:

- Sending keeps to the windows of the peer, of the connection and of the stream. What does not fit waits here.
- Receiving is not limited: the windows that we grant are the largest, and opened again long before they are used up. A
  caller who reads no more from the socket is what holds the peer up.

The frames of a server are covered: DATA, HEADERS, CONTINUATION, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE. All
others are ignored, as the RFC wants it; header blocks are coded by `hpack`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from appliance.wire.http2_headers import (
    EMPTY_TABLE,
    INDEXED_FIELD,
    LARGEST_SHARED_BLOCK,
    Headers,
    block_of,
    changes_table_size,
    headers_without_table,
    never_indexed,
    plain_headers,
    raw,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
FRAME_HEAD = 9  # bytes
DEFAULT_WINDOW, DEFAULT_FRAME_SIZE = 65535, 16384
FIRST_STREAM = 1
LARGEST_WINDOW = LARGEST_STREAM = 2**31 - 1
LARGEST_HEADER_TABLE = 4096
TOP_UP = 2**29  # bytes received after which a window is opened again
MOST_KNOWN_BLOCKS = 16  # of ours, on one connection
OUR_FRAME_SIZE = 2**20
WRITE_BYTES = 2**17  # prepared at once; more waits until that has gone


class HeadersReceived(NamedTuple):
    """The headers of the answer or, when they end the stream, its trailers; or both at once."""

    headers: Headers
    ends: bool


class DataReceived(NamedTuple):
    data: bytes
    ends: bool


class StreamReset(NamedTuple):
    """The peer has given the stream up. error: a number of RFC 9113, section 7."""

    error: int


class StreamUnprocessed(NamedTuple):
    """The peer goes away, and has not looked at the stream."""


class ProtocolViolated(NamedTuple):
    """What came is not HTTP/2. It is the last event of a connection."""

    details: str


StreamEvent = HeadersReceived | DataReceived | StreamReset | StreamUnprocessed | ProtocolViolated


class ProtocolError(Exception):
    """What came is not HTTP/2."""


class Incomplete:
    """The beginning of a frame, or of a message, whose end has not arrived."""

    def __init__(self) -> None:
        self.begun = bytearray()
        self.needed = 0  # bytes without which it is not complete

    def join(self, data: bytes) -> bytes:
        """All bytes that have arrived and are to be looked at; none as long as nothing can be complete."""
        if not self.needed:
            return data
        self.begun += data
        if len(self.begun) < self.needed:
            return b""
        joined = bytes(self.begun)
        self.begun.clear()
        self.needed = 0
        return joined

    def keep(self, rest: bytes, needed: int) -> None:
        self.begun += rest
        self.needed = needed


class ClientConnection:
    """The state of one connection.

    greeted: the peer's first SETTINGS have come, so it has accepted the connection. going_away: it takes no other
    stream. ended: it has ended the open stream. all_sent: we have.
    """

    def __init__(self) -> None:
        self.encoder, self.decoder = Encoder(), Decoder()
        self.known_headers: dict[tuple[tuple[str, str], ...], bytes] = {}
        self.incomplete = Incomplete()
        self.block: bytearray | None = None  # of the headers that arrive
        self.block_ends = False
        self.received = 0  # since the connection's window was opened
        self.stream_received = 0
        self.window, self.first_window, self.frame_size = DEFAULT_WINDOW, DEFAULT_WINDOW, DEFAULT_FRAME_SIZE
        self.next_stream = FIRST_STREAM
        self.greeted = self.going_away = self.violated = self.body_ends = False
        self.stream = 0  # the open one; 0 where there is none
        self.stream_window = self.body_sent = 0
        self.body: bytes | bytearray = b""
        self.ended = self.all_sent = True
        settings = ((ENABLE_PUSH, 0), (HEADER_TABLE_SIZE, 0), (INITIAL_WINDOW_SIZE, LARGEST_WINDOW))
        payload = b"".join(struct.pack(">HI", *each) for each in (*settings, (MAX_FRAME_SIZE, OUR_FRAME_SIZE)))
        opening = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        self.outgoing = bytearray(PREFACE + frame(SETTINGS, 0, 0, payload) + frame(WINDOW_UPDATE, 0, 0, opening))

    @property
    def reusable(self) -> bool:
        """Whether another stream may be opened."""
        usable = not self.going_away and not self.violated and self.next_stream <= LARGEST_STREAM
        return usable and self.ended and self.all_sent

    @property
    def held_back(self) -> bool:
        """Whether what was given to `send` waits for a window of the peer, once `data_to_send` gives nothing more."""
        return not self.ended and self.body_sent < len(self.body)

    # -- sending ------------------------------------------------------------------------------------------------------

    def open(self, headers: Iterable[tuple[str, str]], metadata: Iterable[tuple[str, str]] = ()) -> int:
        """Open a stream, whose number is returned. Only while the connection is `reusable`.

        metadata: headers that are others in the next call; they would only push out what the peer's table has.
        """
        self.stream = self.next_stream
        self.next_stream += 2
        self.stream_window = self.first_window
        self.stream_received = 0
        self.body, self.body_sent, self.body_ends = b"", 0, False
        self.ended = self.all_sent = False
        block = self.encoded(tuple(headers)) + never_indexed(metadata)
        kind = HEADERS
        while len(block) > DEFAULT_FRAME_SIZE:
            self.outgoing += frame(kind, 0, self.stream, block[:DEFAULT_FRAME_SIZE])
            block, kind = block[DEFAULT_FRAME_SIZE:], CONTINUATION
        self.outgoing += frame(kind, END_HEADERS, self.stream, block)
        return self.stream

    def encoded(self, headers: tuple[tuple[str, str], ...]) -> bytes:
        """The block of these headers. One of indexed fields alone, as it is from the third call on, leaves the peer's
        table as it is: it means the same until the table changes. The first call does without the table: for many a
        connection it is the only one.
        """
        if self.stream == FIRST_STREAM and not self.encoder.table_size_changes:
            return block_of(headers)
        known = self.known_headers.get(headers)
        if known is None:
            known = bytes(self.encoder.encode([(raw(key), raw(value)) for key, value in headers], huffman=False))
            if min(known, default=0) < INDEXED_FIELD or len(self.known_headers) == MOST_KNOWN_BLOCKS:
                self.known_headers.clear()
            else:
                self.known_headers[headers] = known
        return known

    def send(self, data: bytes, end: bool) -> None:
        """Send ``data`` on the open stream, as far as the windows allow it, and what is left as soon as they do."""
        if self.body_sent == len(self.body):
            self.body = data
        else:
            self.body = self.body if isinstance(self.body, bytearray) else bytearray(self.body)  # copied once
            del self.body[: self.body_sent]
            self.body += data
        self.body_sent, self.body_ends = 0, end

    def data_to_send(self) -> bytearray:
        """What may go out now, a part of it where it is long; it counts as sent. Empty when there is nothing."""
        while not self.all_sent and len(self.outgoing) < WRITE_BYTES:
            left = len(self.body) - self.body_sent
            room = min(self.window, self.stream_window, self.frame_size)
            if room <= 0 if left else not self.body_ends:
                break
            piece = self.body[self.body_sent : self.body_sent + room] if left else b""
            self.body_sent += len(piece)
            self.window -= len(piece)
            self.stream_window -= len(piece)
            self.all_sent = self.body_ends and self.body_sent == len(self.body)
            self.outgoing += frame(DATA, END_STREAM if self.all_sent else 0, self.stream, piece)
        if self.all_sent:
            self.body = b""  # an idle connection keeps no memory
        data, self.outgoing = self.outgoing, bytearray()
        return data

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[StreamEvent]:
        """The events that ``data`` completes, in order."""
        events: list[StreamEvent] = []
        if self.violated:
            return events
        data = self.incomplete.join(data)
        at, size, needed = 0, len(data), FRAME_HEAD
        try:
            while size - at >= FRAME_HEAD:
                needed = FRAME_HEAD + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
                end = at + needed
                if end > size:
                    break
                stream = int.from_bytes(data[at + 5 : at + 9], "big") & LARGEST_STREAM
                self.take(data[at + 3], data[at + 4], stream, data[at + 9 : end], events)
                at, needed = end, FRAME_HEAD
        except (HPACKError, ProtocolError, IndexError, struct.error) as error:
            self.violated = True
            words = "unreadable headers" if isinstance(error, HPACKError) else "the peer broke the HTTP/2 protocol"
            events.append(ProtocolViolated(f"{words}: {error}"))
            return events
        if at < size:
            self.incomplete.keep(data[at:], needed)
        return events

    def take(self, kind: int, flags: int, stream: int, payload: bytes, events: list[StreamEvent]) -> None:
        """One frame. What belongs to an earlier stream changes the state of the connection, but is no event."""
        ours = stream == self.stream and not self.ended
        if kind == DATA:
            self.open_windows(len(payload), ours)
            if ours:
                self.ended = bool(flags & END_STREAM)
                events.append(DataReceived(unpadded(flags, payload) if flags & PADDED else payload, self.ended))
        elif kind in (HEADERS, CONTINUATION):
            self.take_headers(kind, flags, payload, ours, events)
        elif kind == SETTINGS and not flags & ACK:
            self.take_settings(payload)
        elif kind == PING and not flags & ACK:
            self.outgoing += frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            grant = int.from_bytes(payload, "big") & LARGEST_WINDOW
            if stream == 0:
                self.window += grant
            elif stream == self.stream:
                self.stream_window += grant
        elif kind == RST_STREAM and ours:  # behind the end it only says that the rest of the request is not wanted
            self.ended = True
            events.append(StreamReset(int.from_bytes(payload, "big")))
        elif kind == GOAWAY:
            self.going_away = True
            last = int.from_bytes(payload[:4], "big") & LARGEST_STREAM
            if not self.ended and last < self.stream:
                self.ended = True
                events.append(StreamUnprocessed())

    def open_windows(self, size: int, ours: bool) -> None:
        """Count what has come, and grant it again long before a window is shut, which would stop the peer."""
        self.received += size
        if self.received > TOP_UP:
            self.outgoing += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self.received))
            self.received = 0
        if ours:
            self.stream_received += size
            if self.stream_received > TOP_UP:
                self.outgoing += frame(WINDOW_UPDATE, 0, self.stream, struct.pack(">I", self.stream_received))
                self.stream_received = 0

    def take_headers(self, kind: int, flags: int, payload: bytes, ours: bool, events: list[StreamEvent]) -> None:
        """A part of a header block. Every block is decoded, also another stream's: the decoder has one state."""
        if kind == HEADERS:
            self.block = bytearray()
            self.block_ends = bool(flags & END_STREAM)
            payload = unpadded(flags, payload)[5 if flags & PRIORITY else 0 :]
        if self.block is None:
            raise ProtocolError("CONTINUATION without HEADERS")
        self.block += payload
        if not flags & END_HEADERS:
            return
        headers = self.decoded(bytes(self.block))
        self.block = None
        if ours:
            self.ended = self.block_ends
            events.append(HeadersReceived(list(headers), self.block_ends))

    def decoded(self, block: bytes) -> Headers:
        """The headers of a block.

        The table that we allow the peer has no room, so that from its answer to our settings on, which is a field at
        the beginning of a block, blocks mean the same on all connections, and so do their fields.
        """
        if block.startswith(EMPTY_TABLE):
            self.decoder.header_table_size = 0
            block = block[len(EMPTY_TABLE) :]
        if self.decoder.header_table_size or changes_table_size(block) or len(block) > LARGEST_SHARED_BLOCK:
            return plain_headers(self.decoder, block)
        return headers_without_table(block)

    def take_settings(self, payload: bytes) -> None:
        self.greeted = True
        for number, value in struct.iter_unpack(">HI", payload):
            if number == INITIAL_WINDOW_SIZE:
                self.stream_window += value - self.first_window
                self.first_window = value
            elif number == MAX_FRAME_SIZE:
                self.frame_size = min(value, WRITE_BYTES)
            elif number == HEADER_TABLE_SIZE:
                self.encoder.header_table_size = min(value, LARGEST_HEADER_TABLE)
                self.known_headers.clear()
        self.outgoing += frame(SETTINGS, ACK, 0, b"")


def frame(kind: int, flags: int, stream: int, payload: bytes | bytearray) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def unpadded(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
