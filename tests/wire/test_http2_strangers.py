"""Whatever a stranger sends to a server of HTTP/2, it neither raises nor makes anything grow."""

import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from appliance.wire.http2 import (
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    SETTINGS,
    ProtocolViolated,
    frame,
)
from appliance.wire.http2_server import (
    PRIORITY_FRAME,
    ServerConnection,
    StreamCancelled,
    StreamData,
    StreamOpened,
)
from appliance.wire.served_calls import request_of
from tests.wire.callers import REQUEST, RawCaller

EMPTY_SETTINGS = frame(SETTINGS, 0, 0, b"")
SIZED = struct.Struct(">I")
INDEXED = b"\x83\x86"  # a header block of two fields that every table has


def begun(number: int, payload: bytes = INDEXED) -> bytes:
    """Headers whose block does not end yet."""
    return frame(HEADERS, 0, number, payload)


# -- many of the same --------------------------------------------------------------------------------------------------


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python that takes: a time that is always the same."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("at_once", [True, False])
def test_settings_that_change_windows_take_a_time_that_does_not_multiply_with_the_open_streams(at_once: bool) -> None:
    """A frame has room for 21,000 of them, and 16,000 streams may be open: of all that come the last counts."""
    caller = RawCaller()
    caller.say(*[frame(HEADERS, END_HEADERS, number, INDEXED) for number in range(1, 601, 2)])
    pairs = [(INITIAL_WINDOW_SIZE, 1000 + number % 2) for number in range(200)]
    raw = caller.settings(*pairs) if at_once else b"".join(caller.settings(pair) for pair in pairs)
    assert lines_run(lambda: caller.say(raw)) < 40 * (300 + 200)
    caller.server.reply(1, ((":status", "200"),), bytes(5000), (("grpc-status", "0"),))
    caller.read()
    assert len(caller.bodies[1]) == 1001


FLOODS: dict[str, Callable[[RawCaller, int], bytes]] = {
    "settings": lambda caller, number: caller.settings((INITIAL_WINDOW_SIZE, number)),
    "pings": lambda caller, number: frame(PING, 0, 0, struct.pack(">Q", number)),
    "resets at once": lambda caller, number: caller.open(2 * number + 1) + caller.reset(2 * number + 1),
    "errors of streams": lambda caller, number: (
        caller.open(2 * number + 1, end=True) + caller.data(2 * number + 1, b"more")
    ),
    "empty data": lambda caller, number: (caller.open(1) if number == 0 else b"") + caller.data(1, b""),
    "grants": lambda caller, number: (caller.open(1) if number == 0 else b"") + caller.grant(1, 1) + caller.grant(0, 1),
    "empty continuations": lambda caller, number: begun(1) if number == 0 else frame(CONTINUATION, 0, 1, b""),
    "unknown frames": lambda caller, number: frame(0x42, 0, number, bytes(50)),
    "priorities": lambda caller, number: frame(PRIORITY_FRAME, 0, number + 1, bytes(5)),
    "late data": lambda caller, number: (
        (caller.open(1) + caller.reset(1) if number == 0 else b"") + caller.data(1, bytes(50))
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_leaves_nothing_and_its_answers_are_as_many_as_its_bytes(name: str) -> None:
    caller = RawCaller()
    heard = 0
    for number in range(3000):
        raw = FLOODS[name](caller, number)
        heard += len(raw)
        assert not any(isinstance(event, ProtocolViolated) for event in caller.say(raw))
    server = caller.server
    assert len(server.outgoing) <= 2 * heard
    assert len(server.streams) <= 1
    assert (len(server.waiting), len(server.incomplete.begun), len(server.headers.known_blocks)) <= (0, 0, 1)
    assert server.block is None or len(server.block) <= len(INDEXED)


# -- whatever comes ----------------------------------------------------------------------------------------------------


def good_traffic(chance: random.Random) -> list[bytes]:
    """Frames of calls, in an order that a client may have sent them in."""
    caller = RawCaller()
    frames = [PREFACE, caller.settings((INITIAL_WINDOW_SIZE, chance.choice([0, 100, 70_000])))]
    for number in range(1, 30, 2):
        block = caller.block_of((*REQUEST, ("x-number", str(number % 6))))
        frames += [frame(HEADERS, PADDED, number, b"\x02" + block[:4] + bytes(2))]
        frames += [frame(CONTINUATION, END_HEADERS, number, block[4:]), caller.grant(number, 1000)]
        frames += [caller.data(number, chance.randbytes(chance.randrange(50)), end=chance.random() < 0.7)]
        frames += chance.choices([frame(PING, 0, 0, bytes(8)), caller.grant(0, 100), caller.reset(1), EMPTY_SETTINGS])
    return frames


def mutated(frames: list[bytes], chance: random.Random) -> bytes:
    frames = list(frames)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(1, len(frames))
        each = bytearray(frames[at])
        act = chance.randrange(6)
        if act == 0:
            each[chance.randrange(len(each))] ^= 1 << chance.randrange(8)
        elif act == 1:
            each[3:5] = bytes((chance.randrange(10), chance.randrange(256)))
        elif act == 2:
            each[5:9] = SIZED.pack(chance.choice([0, 1, 2, 29, 31, 2**31 + 1]))
        elif act == 3:
            each = bytearray(frame(each[3], each[4], each[8], bytes(each[9:][: chance.randrange(6)])))
        elif act == 4:
            del frames[at]
            continue
        else:
            frames.insert(chance.randrange(1, len(frames)), bytes(each))
        frames[at] = bytes(each)
    return b"".join(frames)


class Replier:
    """A server that answers whatever it is asked, in parts, and keeps what an application would."""

    def __init__(self) -> None:
        self.server = ServerConnection()
        self.open: set[int] = set()

    def heard(self, raw: bytes) -> bool:
        """Whether it was HTTP/2. No event is of a stream that is not open, and none follows a violation."""
        events = self.server.receive(raw)
        for at, event in enumerate(events):
            if isinstance(event, ProtocolViolated):
                assert at == len(events) - 1
                return False
            self.take(event)
        return True

    def take(self, event: StreamOpened | StreamData | StreamCancelled) -> None:
        if isinstance(event, StreamOpened):
            assert event.stream not in self.open
            self.open.add(event.stream)
            request_of(event.headers)
            self.server.send_headers(event.stream, ((":status", "200"),))
        else:
            assert event.stream in self.open
        if isinstance(event, StreamCancelled):
            self.open.remove(event.stream)
            return
        if isinstance(event, StreamData):
            self.server.consumed(event.stream, event.size)
            self.server.send_data(event.stream, event.data)
        if event.ends:
            self.server.end(event.stream, (("grpc-status", "0"),))


@pytest.mark.parametrize("seed", range(20))
def test_good_traffic_with_something_wrong_in_it_neither_raises_nor_grows(seed: int) -> None:
    chance = random.Random(seed)
    outcomes = set()
    for _ in range(60):
        raw, replier = mutated(good_traffic(chance), chance), Replier()
        good = True
        for at in range(0, len(raw), size := chance.choice([7, 100, len(raw)])):
            good = replier.heard(raw[at : at + size]) and good
        server = replier.server
        outcomes.add(good)
        assert good != server.violated
        assert len(server.outgoing) <= 3 * len(raw) + 200
        assert len(server.incomplete.begun) <= len(raw)
        assert set(server.waiting) <= set(server.streams) <= replier.open
        assert all(server.unsent(number) <= len(raw) for number in server.streams)
        while server.data_to_send():
            pass
        if server.violated:
            assert server.receive(raw) == []
    assert outcomes == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_and_random_bytes_neither_raise_nor_grow(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        replier, heard = Replier(), 0
        assert replier.heard(PREFACE + EMPTY_SETTINGS)
        while heard < 5000:
            payload = chance.randbytes(chance.choice([0, 4, 5, 6, 8, 20, 300]))
            number, flags = chance.choice([0, 1, 3, 5, 2**31 + 7]), chance.choice([0, 1, 4, 5, 8, 0x20, 0xFF])
            raw = frame(chance.choice([*range(10), 0x42]), flags, number, payload)
            raw = chance.choice([raw, raw, chance.randbytes(50)])
            heard += len(raw)
            if not replier.heard(raw):
                break
        server = replier.server
        assert len(server.outgoing) <= 3 * heard + 200
        assert len(server.incomplete.begun) <= heard
        assert len(server.block or b"") <= heard
