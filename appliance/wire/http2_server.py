"""HTTP/2 without a socket: the server's side of one connection (RFC 9113), as `wire.http2` has the client's.

Bytes that have arrived go in, and events come out; what shall be sent is asked for by calls, and collected as bytes:

    connection = ServerConnection()
    for event in connection.receive(socket.recv(65536)):
        ...  # StreamOpened, StreamData, StreamCancelled, ProtocolViolated
    connection.send_headers(stream, headers)
    connection.send_data(stream, message)
    connection.end(stream, trailers)
    socket.sendall(connection.data_to_send())

Many streams are open at a time, and their peer is a stranger. So everything that it can make grow has a limit: the
bytes of one stream and of all that nobody has taken yet (it sends more only when they are `consumed`), a header block,
the streams. `http2_streams` has what is sent.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hpack.exceptions import HPACKError

from appliance.wire.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_STREAM,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WRITE_BYTES,
    Incomplete,
    ProtocolError,
    ProtocolViolated,
    frame,
)
from appliance.wire.http2_headers import HeaderDecoder, HeaderTuple
from appliance.wire.http2_streams import CONNECTION_WINDOW, GOODBYE, ServerStreams, Stream

PRIORITY_FRAME, PUSH_PROMISE = 2, 5
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, MAX_HEADER_LIST_SIZE = 2, 3, 6
PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 2, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11
OUR_FRAME_SIZE = 2**17
MOST_STREAMS = 2**12
HEADER_BYTES = 2**15  # of a call, as clients are told
LARGEST_BLOCK = 2**16  # as it travels


class StreamOpened(NamedTuple):
    """headers: the same object for the same block, as long as it means the same. ends: nothing follows."""

    stream: int
    headers: HeaderTuple
    ends: bool


class StreamData(NamedTuple):
    """size: what `consumed` is to be told when the data has been taken: with the padding."""

    stream: int
    data: bytes
    size: int
    ends: bool


class StreamCancelled(NamedTuple):
    """The peer has given the stream up. error: a number of RFC 9113, section 7."""

    stream: int
    error: int


ServerEvent = StreamOpened | StreamData | StreamCancelled | ProtocolViolated


class ConnectionFailed(ProtocolError):
    """What came breaks the protocol. error: its number."""

    def __init__(self, error: int, words: str) -> None:
        super().__init__(words)
        self.error = error


class ServerConnection(ServerStreams):
    """The state of one connection. greeted: the peer's preface and first frame have come."""

    def __init__(self) -> None:
        super().__init__()
        self.headers = HeaderDecoder()
        self.incomplete = Incomplete()
        self.prefaced = self.greeted = self.violated = False
        self.finished = 0  # frames, but for those of a header block that goes on
        self.newest = 0  # the newest stream that came, also when it was not taken
        self.block: bytearray | None = None  # of the headers that arrive
        self.block_stream, self.block_ends = 0, False
        settings = ((MAX_CONCURRENT_STREAMS, MOST_STREAMS), (MAX_FRAME_SIZE, OUR_FRAME_SIZE))
        payload = b"".join(struct.pack(">HI", *each) for each in (*settings, (MAX_HEADER_LIST_SIZE, HEADER_BYTES)))
        opening = struct.pack(">I", CONNECTION_WINDOW - DEFAULT_WINDOW)
        self.outgoing += frame(SETTINGS, 0, 0, payload) + frame(WINDOW_UPDATE, 0, 0, opening)

    def receive(self, data: bytes) -> list[ServerEvent]:
        """The events that ``data`` completes, in order."""
        events: list[ServerEvent] = []
        if self.violated:
            return events
        data = self.incomplete.join(data)
        at, size, needed = 0, len(data), FRAME_HEAD
        try:
            if not self.prefaced:
                at, needed = self.take_preface(data)
            while self.prefaced and size - at >= FRAME_HEAD:
                length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
                if length > OUR_FRAME_SIZE:
                    raise ConnectionFailed(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                needed = FRAME_HEAD + length
                end = at + needed
                if end > size:
                    break
                number = int.from_bytes(data[at + 5 : at + 9], "big") & LARGEST_STREAM
                self.take(data[at + 3], data[at + 4], number, data[at + 9 : end], events)
                self.finished += self.block is None
                at, needed = end, FRAME_HEAD
            if self.windows_changed:
                self.look_at_windows()
        except ConnectionFailed as failure:
            self.fail(failure.error, str(failure), events)
        except (HPACKError, IndexError) as error:  # hpack's own IndexError, of a block that ends too early
            self.fail(COMPRESSION_ERROR, f"unreadable headers: {error}", events)
        else:
            if at < size:
                self.incomplete.keep(data[at:], needed)
        return events

    @property
    def is_amid(self) -> bool:
        """Whether a frame or a header block has begun and not ended. What has come of it counts in no budget."""
        return bool(self.incomplete.begun) or self.block is not None

    def fail(self, error: int, words: str, events: list[ServerEvent]) -> None:
        self.violated = True
        self.go_away(error, words)
        events.append(ProtocolViolated(words))

    def take_preface(self, data: bytes) -> tuple[int, int]:
        """Where the frames begin, and how many bytes are needed."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ConnectionFailed(PROTOCOL_ERROR, "no preface of HTTP/2")
        if len(data) < len(PREFACE):
            return 0, len(PREFACE)
        self.prefaced = True
        return len(PREFACE), FRAME_HEAD

    def take(self, kind: int, flags: int, number: int, payload: bytes, events: list[ServerEvent]) -> None:
        """One frame."""
        if self.block is not None and (kind != CONTINUATION or number != self.block_stream):
            raise ConnectionFailed(PROTOCOL_ERROR, "a header block was interrupted")
        if not self.greeted:
            if kind != SETTINGS or flags & ACK:
                raise ConnectionFailed(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self.greeted = True
        if kind == DATA:
            self.take_data(flags, number, payload, events)
        elif kind == HEADERS:
            self.begin_headers(flags, number, payload, events)
        elif kind == CONTINUATION:
            if self.block is None:
                raise ConnectionFailed(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            self.take_block(flags, payload, events)
        elif kind == WINDOW_UPDATE:
            self.take_grant(number, payload)
        elif kind == RST_STREAM:
            self.take_reset(number, payload, events)
        elif kind in (SETTINGS, PING, GOAWAY, PRIORITY_FRAME, PUSH_PROMISE):
            self.take_other(kind, flags, number, payload)

    def take_other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Frames of the connection, and those that mean nothing here."""
        if kind == PUSH_PROMISE:
            raise ConnectionFailed(PROTOCOL_ERROR, "PUSH_PROMISE of a client")
        if kind == PRIORITY_FRAME:
            if number == 0 or len(payload) != 5:
                raise ConnectionFailed(PROTOCOL_ERROR if number == 0 else FRAME_SIZE_ERROR, "a damaged PRIORITY")
            return
        if number:
            raise ConnectionFailed(PROTOCOL_ERROR, f"a frame of the connection on stream {number}")
        if kind == PING:
            if len(payload) != 8:
                raise ConnectionFailed(FRAME_SIZE_ERROR, "a damaged PING")
            if not flags & ACK:
                self.outgoing += frame(PING, ACK, 0, payload)
            elif payload == GOODBYE and self.goodbye_said and not self.going_away:
                self.go_away()
        elif kind == SETTINGS:
            self.take_settings(flags, payload)
        elif len(payload) < 8:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "a damaged GOAWAY")

    def take_data(self, flags: int, number: int, payload: bytes, events: list[ServerEvent]) -> None:
        size = len(payload)
        self.room -= size
        if self.room < 0:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "more than the connection's window")
        if not 0 < number <= self.newest:
            raise ConnectionFailed(PROTOCOL_ERROR, f"DATA on stream {number}, which is not open")
        stream = self.streams.get(number)
        if stream is None:  # over for us; it may have been on its way
            self.consumed(number, size)
            return
        if stream.remote_ended:
            self.refuse_stream(number, STREAM_CLOSED, events)
            self.consumed(number, size)
            return
        stream.room -= size
        if stream.room < 0:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "more than the stream's window")
        stream.remote_ended = bool(flags & END_STREAM)
        events.append(StreamData(number, unpadded(flags, payload), size, stream.remote_ended))

    def begin_headers(self, flags: int, number: int, payload: bytes, events: list[ServerEvent]) -> None:
        if number % 2 == 0:
            raise ConnectionFailed(PROTOCOL_ERROR, f"HEADERS on stream {number}")
        payload = unpadded(flags, payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS that are too short for their priority")
            payload = payload[5:]
        self.block, self.block_stream, self.block_ends = bytearray(), number, bool(flags & END_STREAM)
        self.take_block(flags, payload, events)

    def take_block(self, flags: int, payload: bytes, events: list[ServerEvent]) -> None:
        """A part of a header block. Every block is decoded, also one that is refused: the decoder has one state."""
        assert self.block is not None
        self.block += payload
        if len(self.block) > LARGEST_BLOCK:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, f"metadata of more than {LARGEST_BLOCK} bytes")
        if not flags & END_HEADERS:
            return
        headers = self.headers.decoded(bytes(self.block))
        self.block = None
        number = self.block_stream
        if number > self.newest:
            self.open(number, headers, events)
        elif (stream := self.streams.get(number)) is None:
            if not self.block_ends:  # no trailers
                raise ConnectionFailed(PROTOCOL_ERROR, f"HEADERS on stream {number} behind those of {self.newest}")
            return  # trailers of one that is over for us
        elif stream.remote_ended or not self.block_ends:
            self.refuse_stream(number, STREAM_CLOSED if stream.remote_ended else PROTOCOL_ERROR, events)
        else:
            stream.remote_ended = True
            events.append(StreamData(number, b"", 0, True))

    def open(self, number: int, headers: HeaderTuple, events: list[ServerEvent]) -> None:
        self.newest = number
        if self.going_away:  # the peer was told that it was not looked at
            return
        self.last_stream = number
        if len(self.streams) >= MOST_STREAMS:
            self.outgoing += frame(RST_STREAM, 0, number, struct.pack(">I", REFUSED_STREAM))
            return
        self.streams[number] = Stream(self.block_ends)
        events.append(StreamOpened(number, headers, self.block_ends))

    def refuse_stream(self, number: int, error: int, events: list[ServerEvent]) -> None:
        self.reset(number, error)
        events.append(StreamCancelled(number, error))

    def take_grant(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "a damaged WINDOW_UPDATE")
        grant = int.from_bytes(payload, "big") & LARGEST_WINDOW
        if grant == 0 or number > self.newest:
            raise ConnectionFailed(PROTOCOL_ERROR, "a WINDOW_UPDATE that means nothing")
        stream = self.streams.get(number)
        if number == 0:
            self.window += grant
        elif stream:
            stream.granted += grant
            self.let_go_on(number, stream)
        if max(self.window, self.window_of(stream) if stream else 0) > LARGEST_WINDOW:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "a window that is too large")

    def look_at_windows(self) -> None:
        """Once for all settings that came together: there may be as many of them as streams."""
        self.windows_changed = False
        for number, stream in self.streams.items():
            if self.window_of(stream) > LARGEST_WINDOW:
                raise ConnectionFailed(FLOW_CONTROL_ERROR, "a window that is too large")
            self.let_go_on(number, stream)

    def take_reset(self, number: int, payload: bytes, events: list[ServerEvent]) -> None:
        if len(payload) != 4:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "a damaged RST_STREAM")
        if not 0 < number <= self.newest:
            raise ConnectionFailed(PROTOCOL_ERROR, f"RST_STREAM on stream {number}, which is not open")
        if number in self.streams:
            self.forget(number)
            events.append(StreamCancelled(number, int.from_bytes(payload, "big")))

    def take_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFailed(FRAME_SIZE_ERROR, "a damaged SETTINGS")
        if flags & ACK:
            return
        for setting, value in struct.iter_unpack(">HI", payload):
            if setting == INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    raise ConnectionFailed(FLOW_CONTROL_ERROR, "a window that is too large")
                self.first_window, self.windows_changed = value, True
            elif setting == MAX_FRAME_SIZE:
                if not DEFAULT_FRAME_SIZE <= value < 2**24:
                    raise ConnectionFailed(PROTOCOL_ERROR, f"frames of {value} bytes")
                self.frame_size = min(value, WRITE_BYTES)
            elif setting == ENABLE_PUSH and value > 1:
                raise ConnectionFailed(PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
        self.outgoing += frame(SETTINGS, ACK, 0, b"")


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailed(PROTOCOL_ERROR, "more padding than the frame has")
    return payload[1 : len(payload) - payload[0]]
