"""HTTP/2 without a socket: what a server sends on the streams of one connection, as far as the peer's windows allow it.

The other half is `wire.http2_server`. What waits for windows is told by `unsent`: whoever fills it looks at it.
"""

from __future__ import annotations

import struct

from appliance.wire.http2 import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_STREAM,
    PING,
    RST_STREAM,
    WINDOW_UPDATE,
    WRITE_BYTES,
    frame,
)
from appliance.wire.http2_headers import EMPTY_TABLE, HeaderTuple, block_of, response_block

NO_ERROR = 0
GOODBYE = b"goodbye!"  # eight bytes
CONNECTION_WINDOW = 2**23  # bytes that the peer may send on all streams before they are consumed


class Stream:
    """One that is open. granted: by how much its window is another than the first one; room: bytes that the peer may
    still send."""

    __slots__ = ("body", "body_sent", "granted", "local_ends", "remote_ended", "room", "sent", "trailers")

    def __init__(self, remote_ended: bool) -> None:
        self.granted, self.room = 0, DEFAULT_WINDOW
        self.remote_ended = remote_ended
        self.body, self.body_sent = bytearray(), 0  # what waits for windows
        self.sent = 0  # bytes, of all that there was
        self.local_ends = False
        self.trailers = b""  # the block that follows the body


class ServerStreams:
    """The open streams of a connection."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.waiting: dict[int, Stream] = {}  # whose body may go on, as far as their own windows are concerned
        self.last_stream = 0  # the newest of the peer
        self.window, self.first_window, self.frame_size = DEFAULT_WINDOW, DEFAULT_WINDOW, DEFAULT_FRAME_SIZE
        self.room, self.owed = CONNECTION_WINDOW, 0  # owed: consumed, and not granted again yet
        self.headers_begin = EMPTY_TABLE  # before the first block
        self.unsent_bytes = 0  # of all streams
        self.closed: list[int] = []  # streams, for whoever wants to know; to be cleared by him
        self.windows_changed = False  # by settings that nobody has looked at
        self.goodbye_said = self.going_away = False
        self.outgoing = bytearray()

    def send_headers(self, number: int, headers: HeaderTuple) -> None:
        """The first headers of the reply. Nothing once the stream is over, as the others that send."""
        if number in self.streams:
            self.send_block(number, response_block(headers), 0)

    def send_data(self, number: int, data: bytes) -> None:
        """As far as the windows allow it, and what is left as soon as they do."""
        if stream := self.streams.get(number):
            stream.body += data
            self.unsent_bytes += len(data)
            self.waiting[number] = stream

    def end(self, number: int, trailers: HeaderTuple) -> None:
        """Behind the body, and end the stream."""
        if stream := self.streams.get(number):
            stream.trailers = block_of(trailers)
            stream.local_ends = True
            self.waiting[number] = stream

    def end_at_once(self, number: int, headers: HeaderTuple) -> None:
        """A reply that is its headers alone, or trailers for which what waits is dropped."""
        if number in self.streams:
            block = response_block(headers) if headers[0][0] == ":status" else block_of(headers)
            self.send_block(number, block, END_STREAM)
            self.close(number)

    def reply(self, number: int, headers: HeaderTuple, data: bytes, trailers: HeaderTuple) -> None:
        """A whole reply: the same as `send_headers`, `send_data` and `end`."""
        stream = self.streams.get(number)
        if stream is None:
            return
        size, first, last = len(data), response_block(headers), block_of(trailers)
        room = min(self.window, self.window_of(stream), self.frame_size)
        is_long = size > room or len(first) > DEFAULT_FRAME_SIZE or len(last) > DEFAULT_FRAME_SIZE
        if is_long or self.headers_begin or self.waiting:
            self.send_headers(number, headers)
            self.send_data(number, data)
            self.end(number, trailers)
            return
        self.window -= size
        self.outgoing += frame(HEADERS, END_HEADERS, number, first)
        self.outgoing += frame(DATA, 0, number, data)
        self.outgoing += frame(HEADERS, END_HEADERS | END_STREAM, number, last)
        self.close(number)

    def send_block(self, number: int, block: bytes, flags: int) -> None:
        block = self.headers_begin + block
        self.headers_begin = b""
        kind = HEADERS
        while len(block) > DEFAULT_FRAME_SIZE:
            self.outgoing += frame(kind, flags, number, block[:DEFAULT_FRAME_SIZE])
            block, kind, flags = block[DEFAULT_FRAME_SIZE:], CONTINUATION, 0
        self.outgoing += frame(kind, flags | END_HEADERS, number, block)

    def reset(self, number: int, error: int) -> None:
        if number in self.streams:
            self.outgoing += frame(RST_STREAM, 0, number, struct.pack(">I", error))
            self.close(number, silent=True)

    def close(self, number: int, silent: bool = False) -> None:
        """Of a stream that we have ended. Where the peer has not, it need not go on (RFC 9113, 8.1)."""
        stream = self.forget(number)
        if not stream.remote_ended and not silent:
            self.outgoing += frame(RST_STREAM, 0, number, struct.pack(">I", NO_ERROR))

    def forget(self, number: int) -> Stream:
        """It is over for both sides, or for the peer, which does not want the rest."""
        stream = self.streams.pop(number)
        self.waiting.pop(number, None)
        self.unsent_bytes -= len(stream.body) - stream.body_sent
        self.closed.append(number)
        return stream

    def say_goodbye(self) -> None:
        """No other stream shall be begun. What is on its way is taken: the peer answers a ping behind it, and then the
        last stream is known (`go_away`)."""
        if not self.goodbye_said:
            self.goodbye_said = True
            self.outgoing += frame(GOAWAY, 0, 0, struct.pack(">II", LARGEST_STREAM, NO_ERROR))
            self.outgoing += frame(PING, 0, 0, GOODBYE)

    def go_away(self, error: int = NO_ERROR, words: str = "") -> None:
        """No other stream is taken. words: why, which clients show."""
        self.going_away = True
        self.outgoing += frame(GOAWAY, 0, 0, struct.pack(">II", self.last_stream, error) + words.encode())

    def consumed(self, number: int, size: int) -> None:
        """So much of what came on a stream has been taken: the peer may send as much again."""
        self.owed += size
        if self.owed >= CONNECTION_WINDOW // 4:
            self.outgoing += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self.owed))
            self.room += self.owed
            self.owed = 0
        self.grant(number, size)

    def grant(self, number: int, size: int) -> None:
        """Let the peer send so many bytes more on a stream."""
        stream = self.streams.get(number)
        if size and stream and not stream.remote_ended:
            stream.room += size
            self.outgoing += frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size))

    def window_of(self, stream: Stream) -> int:
        return self.first_window + stream.granted

    def unsent(self, number: int) -> int:
        """Bytes of a stream's body that wait for the peer's windows."""
        stream = self.streams.get(number)
        return len(stream.body) - stream.body_sent if stream else 0

    def data_to_send(self) -> bytearray:
        """What may go out now, a part of it where it is long; it counts as sent. Empty when there is nothing."""
        for number in list(self.waiting):
            if len(self.outgoing) >= WRITE_BYTES:
                break
            if self.window <= 0 and self.unsent(number):  # what has only trailers left needs none
                continue
            self.send_body(number, self.waiting.pop(number))
        data, self.outgoing = self.outgoing, bytearray()
        return data

    def send_body(self, number: int, stream: Stream) -> None:
        size = len(stream.body)
        while stream.body_sent < size:
            room = min(self.window, self.window_of(stream), self.frame_size)
            if room <= 0 or len(self.outgoing) >= WRITE_BYTES:
                if self.window_of(stream) > 0:  # else it waits for its own window, and is nobody's turn until then
                    self.waiting[number] = stream
                if stream.body_sent > size // 2:
                    del stream.body[: stream.body_sent]
                    stream.body_sent = 0
                return
            piece = stream.body[stream.body_sent : stream.body_sent + room]
            stream.body_sent += len(piece)
            stream.sent += len(piece)
            self.unsent_bytes -= len(piece)
            self.window -= len(piece)
            stream.granted -= len(piece)
            self.outgoing += frame(DATA, 0, number, piece)
        stream.body, stream.body_sent = bytearray(), 0  # an idle stream keeps no memory
        if stream.local_ends:
            self.send_block(number, stream.trailers, END_STREAM)
            self.close(number)

    def let_go_on(self, number: int, stream: Stream) -> None:
        """Its window has become another one."""
        if stream.body_sent < len(stream.body):
            self.waiting[number] = stream
