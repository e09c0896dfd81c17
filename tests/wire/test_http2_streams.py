"""What a server sends on many streams: whole replies and those in parts, and whose turn it is."""

import os
import random

import pytest

from appliance.wire.http2 import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    RST_STREAM,
    WRITE_BYTES,
)
from tests.wire.callers import RawCaller, calling

HEAD = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)
LARGE = ((INITIAL_WINDOW_SIZE, 2**30), (MAX_FRAME_SIZE, 2**20))


# -- replies -----------------------------------------------------------------------------------------------------------


def test_a_reply_is_headers_data_and_trailers_and_the_stream_is_forgotten() -> None:
    caller = calling(1, 3)
    for stream in (1, 3):  # the first block of a connection is not like the others: it empties the table
        caller.server.reply(stream, HEAD, b"message", OK)
        sent = [(each.kind, each.flags, each.stream) for each in caller.read()]
        last = END_HEADERS | END_STREAM
        assert sent == [(HEADERS, END_HEADERS, stream), (DATA, 0, stream), (HEADERS, last, stream)]
        assert (caller.blocks[stream], caller.bodies[stream]) == ([HEAD, OK], b"message")
    assert caller.server.streams == {}
    assert caller.server.waiting == {}


@pytest.mark.parametrize("size", [0, 1, DEFAULT_FRAME_SIZE, DEFAULT_FRAME_SIZE + 1, DEFAULT_WINDOW, 200_000])
def test_a_reply_at_once_and_one_in_parts_are_the_same(size: int) -> None:
    message = os.urandom(size)
    caller = calling(1, 3, 5)
    caller.server.reply(1, HEAD, b"", OK)
    caller.server.reply(3, HEAD, message, OK)
    caller.server.send_headers(5, HEAD)
    for at in range(0, size, 50_000):
        caller.server.send_data(5, message[at : at + 50_000])
    caller.server.end(5, OK)
    for _ in range(5):
        caller.read()
        # Nothing of it is an error when the stream has ended meanwhile.
        caller.say(caller.grant(0, 2**17), caller.grant(3, 2**17), caller.grant(5, 2**17))
    caller.read()
    for stream in (3, 5):
        assert (caller.blocks[stream], caller.bodies[stream]) == ([HEAD, OK], message)
    assert sorted(caller.ended) == [1, 3, 5]
    assert caller.goaways == []


def test_a_reply_before_the_request_has_ended_says_that_the_rest_is_not_wanted() -> None:
    """RFC 9113, 8.1."""
    caller = RawCaller()
    caller.say(*[caller.open(stream) for stream in (1, 3, 5)], caller.data(5, b"", end=True))
    caller.server.reply(1, HEAD, b"x", OK)
    caller.read()
    caller.server.end_at_once(3, (*HEAD, *OK))
    caller.server.reply(5, HEAD, b"x", OK)
    caller.read()
    assert caller.ended == [1, 3, 5]
    assert caller.resets == {1: 0, 3: 0}
    resets = [at for at, each in enumerate(caller.frames) if each.kind == RST_STREAM]
    assert all(caller.frames[at - 1].flags & END_STREAM for at in resets)


def test_an_end_at_once_drops_what_waits() -> None:
    caller = calling(1)
    caller.server.send_headers(1, HEAD)
    caller.server.send_data(1, bytes(100_000))
    caller.read()
    assert caller.server.unsent(1) == 100_000 - DEFAULT_WINDOW
    caller.server.end_at_once(1, (("grpc-status", "4"),))
    caller.read()
    caller.say(caller.grant(0, 2**20))
    assert caller.read() == []
    assert caller.blocks[1] == [HEAD, (("grpc-status", "4"),)]
    assert len(caller.bodies[1]) == DEFAULT_WINDOW
    assert (caller.ended, caller.server.unsent(1), caller.server.streams) == ([1], 0, {})


@pytest.mark.parametrize("over", ["replied", "reset by the caller", "reset here", "never opened"])
def test_nothing_is_sent_on_a_stream_that_is_over(over: str) -> None:
    caller = calling(*(() if over == "never opened" else (1,)))
    if over == "replied":
        caller.server.reply(1, HEAD, b"", OK)
    elif over == "reset by the caller":
        caller.say(caller.reset(1))
    elif over == "reset here":
        caller.server.reset(1, 8)
    caller.read()
    caller.server.send_headers(1, HEAD)
    caller.server.send_data(1, b"data")
    caller.server.end(1, OK)
    caller.server.end_at_once(1, OK)
    caller.server.reply(1, HEAD, b"data", OK)
    caller.server.reset(1, 8)
    caller.server.grant(1, 1000)
    assert caller.read() == []
    assert caller.server.unsent(1) == 0


def test_long_headers_and_trailers_go_on_in_continuations() -> None:
    head = (*HEAD, ("x-long", "v" * 3 * DEFAULT_FRAME_SIZE))
    end = (*OK, ("x-longer", "w" * 2 * DEFAULT_FRAME_SIZE))
    caller = calling(1, 3, 5)
    for stream in (1, 3, 5):
        if stream == 5:
            caller.server.end_at_once(stream, (*head, *OK))
        else:
            caller.server.reply(stream, head, b"data", end)
            caller.read()
    caller.read()
    blocks = [each for each in caller.frames if each.kind in (HEADERS, CONTINUATION) and each.stream == 3]
    rest = [(CONTINUATION, 0)] * 2 + [(CONTINUATION, END_HEADERS)]
    expected = [(HEADERS, 0), *rest, (HEADERS, END_STREAM), (CONTINUATION, 0), (CONTINUATION, END_HEADERS)]
    assert [(each.kind, each.flags) for each in blocks] == expected
    assert max(len(each.payload) for each in blocks) <= DEFAULT_FRAME_SIZE
    assert caller.blocks == {1: [head, end], 3: [head, end], 5: [(*head, *OK)]}
    assert caller.bodies == {1: b"data", 3: b"data"}


def test_no_table_of_the_peer_is_used_so_that_replies_do_not_depend_on_each_other() -> None:
    caller = calling(*range(1, 21, 2))
    for stream in range(1, 21, 2):
        caller.server.reply(stream, (*HEAD, ("x-number", str(stream % 4))), b"", OK)
    caller.read()
    assert caller.decoder.header_table_size == 0
    assert list(caller.decoder.header_table.dynamic_entries) == []
    assert caller.blocks[7][0] == (*HEAD, ("x-number", "3"))


# -- whose turn it is --------------------------------------------------------------------------------------------------


def test_much_data_goes_out_in_parts_and_streams_take_turns() -> None:
    caller = calling(1, 3, 5, 7, settings=LARGE)
    caller.say(caller.grant(0, 2**30))
    for stream in (1, 3, 5):
        caller.server.reply(stream, HEAD, bytes(2**21), OK)
    caller.server.send_headers(7, HEAD)
    caller.server.send_data(7, b"small")
    longest, most = 0, 0
    while part := caller.server.data_to_send():
        longest = max(longest, len(part))
        caller.cut(part)
        if set(caller.ended) < {1}:
            sizes = [len(caller.bodies[stream]) for stream in (1, 3, 5)]
            most = max(most, max(sizes) - min(sizes))
    assert longest <= 2 * WRITE_BYTES + 1000
    assert most <= 2 * WRITE_BYTES
    assert [len(caller.bodies[stream]) for stream in (1, 3, 5, 7)] == [2**21] * 3 + [5]


def test_a_small_window_goes_round_and_leaves_nobody_out() -> None:
    caller = calling(1, 3, 5, settings=LARGE)
    caller.server.reply(1, HEAD, bytes(DEFAULT_WINDOW), OK)
    caller.read()
    caller.say(*[caller.open(stream, end=True) for stream in (7, 9, 11)])
    streams = (3, 5, 7, 9, 11)
    for stream in streams:
        caller.server.reply(stream, HEAD, bytes(1000), OK)
    for turn in range(1, 6):
        for _ in streams:
            caller.say(caller.grant(0, 100))
            caller.read()
        assert [len(caller.bodies[stream]) for stream in streams] == [100 * turn] * 5


def test_a_stream_whose_own_window_is_shut_holds_up_no_other() -> None:
    caller = calling(1, 3, settings=[(INITIAL_WINDOW_SIZE, 100)])
    caller.server.reply(1, HEAD, bytes(1000), OK)
    caller.read()
    assert caller.server.waiting == {}  # it is nobody's turn, and nothing looks at it again and again
    caller.server.reply(3, HEAD, bytes(100), OK)
    caller.read()
    assert caller.ended == [3]
    caller.say(caller.grant(1, 900))
    caller.read()
    assert (caller.ended, len(caller.bodies[1])) == ([3, 1], 1000)


def test_what_has_been_sent_is_not_kept() -> None:
    caller = calling(1, settings=LARGE)
    caller.server.send_headers(1, HEAD)
    caller.server.send_data(1, bytes(1000))
    caller.read()
    assert caller.server.streams[1].body == b""


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_windows_do_every_body_arrives_whole_and_none_is_overdrawn(seed: int) -> None:
    chance = random.Random(seed)
    streams = range(1, 17, 2)
    first = chance.choice([0, 1, 500, DEFAULT_WINDOW])
    caller = calling(*streams, settings=[(INITIAL_WINDOW_SIZE, first), (MAX_FRAME_SIZE, DEFAULT_FRAME_SIZE)])
    bodies = {stream: chance.randbytes(chance.choice([0, 1, 3000, 60_000])) for stream in streams}
    rests = dict(bodies)
    windows = dict.fromkeys((0, *streams), first) | {0: DEFAULT_WINDOW}
    for stream in streams:
        caller.server.send_headers(stream, HEAD)
    for _ in range(3000):
        stream = chance.choice(streams)
        act = chance.randrange(6)
        if act < 3 and stream in rests:
            size = chance.choice([0, 1, 5000, 60_000])
            caller.server.send_data(stream, rests[stream][:size])
            rests[stream] = rests[stream][size:]
            if not rests[stream]:
                del rests[stream]
                caller.server.end(stream, OK)
        elif act == 3:
            stream, size = chance.choice([0, stream]), chance.choice([1, 1000, 50_000])
            caller.say(caller.grant(stream, size))
            windows[stream] += size
        elif act == 4:
            changed = chance.choice([0, 1, 500, 30_000])
            caller.say(caller.settings((INITIAL_WINDOW_SIZE, changed)))
            windows |= {stream: windows[stream] + changed - first for stream in streams}
            first = changed
        for each in caller.read():
            if each.kind == DATA:
                windows[0] -= len(each.payload)
                windows[each.stream] -= len(each.payload)
                assert windows[0] >= 0
                assert windows[each.stream] >= 0
    assert rests == {}
    for _ in range(20):
        caller.say(caller.grant(0, 60_000), *[caller.grant(stream, 60_000) for stream in streams])
        caller.read()
    assert {stream: caller.bodies[stream] for stream in streams} == bodies
    assert {stream: caller.blocks[stream] for stream in streams} == {stream: [HEAD, OK] for stream in streams}
    assert caller.goaways == []
