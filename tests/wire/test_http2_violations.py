"""What a stranger may send to a server that is not HTTP/2: each kind ends the connection with its error."""

import struct

import pytest

from appliance.wire.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ProtocolViolated,
    frame,
)
from appliance.wire.http2_server import (
    COMPRESSION_ERROR,
    ENABLE_PUSH,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    LARGEST_BLOCK,
    OUR_FRAME_SIZE,
    PRIORITY_FRAME,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    ServerConnection,
    StreamData,
)
from appliance.wire.http2_streams import CONNECTION_WINDOW
from tests.wire.callers import RawCaller

EMPTY_SETTINGS = frame(SETTINGS, 0, 0, b"")
SIZED = struct.Struct(">I")
INDEXED = b"\x83\x86"  # a header block of two fields that every table has


def error_of(server: ServerConnection) -> tuple[int, int]:
    """What the goodbye says, which is the last frame, and says why: (the last stream, the error)."""
    sent = bytes(server.data_to_send())
    head = sent.rindex(bytes((GOAWAY, 0, 0, 0, 0, 0)))
    last, error = struct.unpack(">II", sent[head + 6 : head + 14])
    assert sent[head + 14 :].isascii()
    assert int.from_bytes(sent[head - 3 : head]) == len(sent[head + 6 :]) > 8
    return last, error


def setting(number: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", number, value))


def begun(number: int, payload: bytes = INDEXED) -> bytes:
    """Headers whose block does not end yet."""
    return frame(HEADERS, 0, number, payload)


# Behind the preface, the settings, and the open streams 1, 3 (which its caller has ended) and 5.
VIOLATIONS: dict[str, tuple[bytes, int]] = {
    # header blocks that are interrupted
    "data inside a block": (begun(7) + frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "headers inside a block": (begun(7) + frame(HEADERS, END_HEADERS, 9, INDEXED), PROTOCOL_ERROR),
    "the same stream's headers inside a block": (begun(7) + frame(HEADERS, END_HEADERS, 7, INDEXED), PROTOCOL_ERROR),
    "a ping inside a block": (begun(7) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "an unknown frame inside a block": (begun(7) + frame(0x42, 0, 7, b""), PROTOCOL_ERROR),
    "another stream's continuation": (begun(7) + frame(CONTINUATION, END_HEADERS, 9, INDEXED), PROTOCOL_ERROR),
    "a continuation of nothing": (frame(CONTINUATION, END_HEADERS, 1, INDEXED), PROTOCOL_ERROR),
    "a continuation of a block that has ended": (
        frame(HEADERS, END_HEADERS, 7, INDEXED) + frame(CONTINUATION, END_HEADERS, 7, INDEXED),
        PROTOCOL_ERROR,
    ),
    # streams that are not there
    "headers on stream 0": (frame(HEADERS, END_HEADERS, 0, INDEXED), PROTOCOL_ERROR),
    "headers on a stream of ours": (frame(HEADERS, END_HEADERS, 8, INDEXED), PROTOCOL_ERROR),
    "data on stream 0": (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "data on a stream that is idle": (frame(DATA, 0, 7, b"x"), PROTOCOL_ERROR),
    "a reset of stream 0": (frame(RST_STREAM, 0, 0, SIZED.pack(8)), PROTOCOL_ERROR),
    "a reset of a stream that is idle": (frame(RST_STREAM, 0, 7, SIZED.pack(8)), PROTOCOL_ERROR),
    "a grant for a stream that is idle": (frame(WINDOW_UPDATE, 0, 7, SIZED.pack(8)), PROTOCOL_ERROR),
    "a priority of stream 0": (frame(PRIORITY_FRAME, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "settings of a stream": (frame(SETTINGS, 0, 1, b""), PROTOCOL_ERROR),
    "a ping of a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "a goodbye of a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "a push of a client": (frame(PUSH_PROMISE, END_HEADERS, 1, SIZED.pack(2) + INDEXED), PROTOCOL_ERROR),
    # lengths
    "a frame that is too large": (frame(0x42, 0, 0, bytes(OUR_FRAME_SIZE + 1)), FRAME_SIZE_ERROR),
    "the head of a frame that is too large": (b"\xff\xff\xff\0\0\0\0\0\1", FRAME_SIZE_ERROR),
    "a short ping": (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "a long ping": (frame(PING, ACK, 0, bytes(9)), FRAME_SIZE_ERROR),
    "a short grant": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "a long grant": (frame(WINDOW_UPDATE, 0, 1, SIZED.pack(1) + b"\0"), FRAME_SIZE_ERROR),
    "a short reset": (frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    "a long reset": (frame(RST_STREAM, 0, 1, bytes(5)), FRAME_SIZE_ERROR),
    "a short priority": (frame(PRIORITY_FRAME, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    "a long priority": (frame(PRIORITY_FRAME, 0, 1, bytes(6)), FRAME_SIZE_ERROR),
    "a short goodbye": (frame(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "settings that are cut": (frame(SETTINGS, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    # padding, and what else stands before the data
    "padded data without a length": (frame(DATA, PADDED, 1, b""), PROTOCOL_ERROR),
    "more padding than data": (frame(DATA, PADDED, 1, b"\x03" + bytes(2)), PROTOCOL_ERROR),
    "more padding than headers": (frame(HEADERS, PADDED | END_HEADERS, 7, b"\x03" + INDEXED), PROTOCOL_ERROR),
    "headers too short for their priority": (
        frame(HEADERS, PRIORITY | END_HEADERS, 7, bytes(4)),
        FRAME_SIZE_ERROR,
    ),
    # windows
    "a grant of nothing to the connection": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
    "a grant of nothing to a stream": (frame(WINDOW_UPDATE, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "a window of the connection that is too large": (
        frame(WINDOW_UPDATE, 0, 0, SIZED.pack(LARGEST_WINDOW - DEFAULT_WINDOW + 1)),
        FLOW_CONTROL_ERROR,
    ),
    "a window of a stream that is too large": (
        frame(WINDOW_UPDATE, 0, 1, SIZED.pack(LARGEST_WINDOW - DEFAULT_WINDOW + 1)),
        FLOW_CONTROL_ERROR,
    ),
    "more than the stream's window": (frame(DATA, 0, 1, bytes(DEFAULT_WINDOW + 1)), FLOW_CONTROL_ERROR),
    "padding beyond the stream's window": (
        frame(DATA, 0, 1, bytes(DEFAULT_WINDOW)) + frame(DATA, PADDED, 1, b"\0"),
        FLOW_CONTROL_ERROR,
    ),
    # settings
    "first windows that are too large": (setting(INITIAL_WINDOW_SIZE, LARGEST_WINDOW + 1), FLOW_CONTROL_ERROR),
    "frames that are too small": (setting(MAX_FRAME_SIZE, DEFAULT_FRAME_SIZE - 1), PROTOCOL_ERROR),
    "frames that are larger than a frame can be": (setting(MAX_FRAME_SIZE, 2**24), PROTOCOL_ERROR),
    "pushes that are neither on nor off": (setting(ENABLE_PUSH, 2), PROTOCOL_ERROR),
    # header blocks
    "a field that the table does not have": (frame(HEADERS, END_HEADERS, 7, b"\xfe"), COMPRESSION_ERROR),
    "field 0": (frame(HEADERS, END_HEADERS, 7, b"\x80"), COMPRESSION_ERROR),
    "a number without an end": (frame(HEADERS, END_HEADERS, 7, b"\xff" * 20), COMPRESSION_ERROR),
    "a field that is cut": (frame(HEADERS, END_HEADERS, 7, b"\x40"), COMPRESSION_ERROR),
    "a name that is cut": (frame(HEADERS, END_HEADERS, 7, b"\x40\x05nam"), COMPRESSION_ERROR),
    "a value that is cut": (frame(HEADERS, END_HEADERS, 7, b"\x40\x01n\x05val"), COMPRESSION_ERROR),
    "a table that is too large": (frame(HEADERS, END_HEADERS, 7, b"\x3f\xe2\x1f"), COMPRESSION_ERROR),
    "unreadable trailers": (frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x80"), COMPRESSION_ERROR),
    "unreadable headers of a stream that is over": (frame(HEADERS, END_HEADERS, 3, b"\x80"), COMPRESSION_ERROR),
    "a block that is too large": (begun(7, bytes(LARGEST_BLOCK + 1)), ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_violation_ends_the_connection_with_its_error(name: str) -> None:
    wrong, error = VIOLATIONS[name]
    caller = RawCaller()
    caller.say(caller.open(1), caller.open(3, end=True), caller.open(5))
    good = caller.data(5, b"good")
    events = caller.say(good, wrong, caller.data(5, b"never seen"))
    assert events[0] == StreamData(5, b"good", 4, False)
    assert isinstance(events[-1], ProtocolViolated)
    assert events[-1].details
    assert StreamData(5, b"never seen", 10, False) not in events
    assert error_of(caller.server) == (caller.server.last_stream, error)
    assert caller.say(good) == []
    assert not caller.server.incomplete.begun


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
        PREFACE[:-1] + b"X",
        b"\x16\x03\x01" + bytes(300),
        PREFACE + frame(PING, 0, 0, bytes(8)),
        PREFACE + frame(SETTINGS, ACK, 0, b""),
        PREFACE + frame(0x42, 0, 0, b"") + EMPTY_SETTINGS,
        PREFACE + frame(HEADERS, END_HEADERS, 1, INDEXED),
        EMPTY_SETTINGS + PREFACE,
    ],
)
def test_a_connection_that_begins_otherwise_is_none(first: bytes) -> None:
    server = ServerConnection()
    (violated,) = server.receive(first)
    assert isinstance(violated, ProtocolViolated)
    assert not server.greeted
    assert error_of(server) == (0, PROTOCOL_ERROR)


def test_settings_do_not_make_the_window_of_a_stream_too_large() -> None:
    """RFC 9113, 6.9.2."""
    caller = RawCaller()
    largest = caller.grant(1, LARGEST_WINDOW - DEFAULT_WINDOW)
    assert len(caller.say(caller.open(1), largest, setting(INITIAL_WINDOW_SIZE, DEFAULT_WINDOW))) == 1
    assert [type(event) for event in caller.say(setting(INITIAL_WINDOW_SIZE, DEFAULT_WINDOW + 1))] == [ProtocolViolated]
    assert error_of(caller.server) == (1, FLOW_CONTROL_ERROR)


def test_nobody_sends_more_on_all_streams_than_the_connections_window() -> None:
    caller = RawCaller()
    chunk = bytes(DEFAULT_WINDOW // 2 + 1)
    numbers = range(1, 2 * CONNECTION_WINDOW // len(chunk) + 1, 2)
    caller.say(*[caller.open(number) for number in numbers])
    events = [event for number in numbers for event in caller.say(caller.data(number, chunk))]
    assert sum(event.size for event in events if isinstance(event, StreamData)) == CONNECTION_WINDOW
    (violated,) = caller.say(caller.data(1, b"x"))  # the stream's own window would let it through
    assert isinstance(violated, ProtocolViolated)
    assert error_of(caller.server) == (numbers[-1], FLOW_CONTROL_ERROR)


def test_a_number_that_was_left_out_cannot_be_used_later() -> None:
    """RFC 9113, 5.1.1. It is no trailer, for it does not end its stream: its caller would wait for ever."""
    caller = RawCaller()
    caller.say(caller.open(5))
    assert [type(event) for event in caller.say(caller.open(3))] == [ProtocolViolated]
    assert error_of(caller.server) == (5, PROTOCOL_ERROR)
