"""Flow control of a server, in both directions: what waits for the peer's windows, and what the peer may send."""

import os
import struct

from appliance.wire.http2 import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
)
from appliance.wire.http2_streams import CONNECTION_WINDOW
from tests.wire.callers import REQUEST, RawCaller, calling
from tests.wire.peers import Frame

HEAD = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)
LARGE = ((INITIAL_WINDOW_SIZE, 2**30), (MAX_FRAME_SIZE, 2**20))


# -- flow control ------------------------------------------------------------------------------------------------------


def test_windows_that_open_late_let_everything_through_and_are_never_overdrawn() -> None:
    caller = calling(1, settings=[(INITIAL_WINDOW_SIZE, 10)])
    sent, granted = os.urandom(70_000), 10
    caller.server.reply(1, HEAD, sent, OK)
    while granted < len(sent):
        caller.read()
        assert caller.bodies[1] == sent[:granted]
        assert caller.server.unsent(1) == len(sent) - granted
        assert caller.ended == []
        caller.say(caller.grant(0, 7000))
        assert caller.read() == []  # the stream's window counts, too
        caller.say(caller.grant(1, 7000))
        granted += 7000
    caller.read()
    assert (caller.bodies[1], caller.blocks[1], caller.ended) == (sent, [HEAD, OK], [1])


def test_the_connections_window_is_shared_by_all_streams() -> None:
    caller = calling(1, 3, settings=LARGE)
    for stream in (1, 3):
        caller.server.reply(stream, HEAD, bytes(50_000), OK)
        caller.read()
    assert (len(caller.bodies[1]), len(caller.bodies[3])) == (50_000, DEFAULT_WINDOW - 50_000)
    caller.say(caller.grant(3, 2**20))
    assert caller.read() == []
    caller.say(caller.grant(0, 100_000 - DEFAULT_WINDOW - 1))
    caller.read()
    assert (len(caller.bodies[3]), caller.ended) == (49_999, [1])
    caller.say(caller.grant(0, 1))
    caller.read()
    assert (len(caller.bodies[3]), caller.ended) == (50_000, [1, 3])


def test_settings_change_the_windows_of_streams_in_the_middle_of_their_bodies() -> None:
    caller = calling(1, 3, settings=[(INITIAL_WINDOW_SIZE, 1000)])
    caller.say(caller.grant(0, 2**20))
    caller.server.reply(1, HEAD, bytes(5000), OK)
    caller.read()
    caller.say(caller.settings((INITIAL_WINDOW_SIZE, 200)))  # 800 below zero
    caller.server.reply(3, HEAD, bytes(300), OK)
    caller.read()
    assert (len(caller.bodies[1]), len(caller.bodies[3])) == (1000, 200)
    caller.say(caller.grant(1, 800))  # exactly zero
    caller.server.send_data(1, b"")
    assert caller.read() == []
    caller.say(caller.grant(1, 1))
    caller.read()
    assert (len(caller.bodies[1]), len(caller.bodies[3])) == (1001, 200)
    caller.say(caller.settings((INITIAL_WINDOW_SIZE, 0), (INITIAL_WINDOW_SIZE, 300)))
    caller.read()
    assert (len(caller.bodies[1]), len(caller.bodies[3]), caller.ended) == (1101, 300, [3])
    caller.say(caller.settings((INITIAL_WINDOW_SIZE, LARGEST_WINDOW - 4000)))
    caller.read()
    assert (len(caller.bodies[1]), caller.ended) == (5000, [3, 1])
    caller.say(caller.settings((INITIAL_WINDOW_SIZE, 7)), caller.open(5, end=True))
    caller.server.reply(5, HEAD, bytes(10), OK)
    caller.read()
    assert len(caller.bodies[5]) == 7


def test_a_reply_without_a_message_needs_no_window() -> None:
    caller = calling(1, 3, settings=[(INITIAL_WINDOW_SIZE, 10)])
    caller.server.send_headers(1, HEAD)
    caller.server.send_data(1, bytes(10))
    caller.read()
    caller.say(caller.settings((INITIAL_WINDOW_SIZE, 0)))
    caller.server.reply(3, HEAD, b"", OK)
    caller.server.end(1, OK)
    caller.read()
    assert sorted(caller.ended) == [1, 3]


def test_trailers_do_not_wait_for_a_window_that_another_body_has_used_up() -> None:
    """Only DATA is counted (RFC 9113, 6.9): a caller may wait for this status before it reads the other body."""
    caller = calling(1, 3, 5, settings=LARGE)
    caller.server.send_headers(3, HEAD)
    caller.server.send_data(3, b"message")
    caller.read()
    caller.server.reply(1, HEAD, bytes(100_000), OK)
    caller.read()
    caller.server.end(3, OK)
    caller.server.reply(5, HEAD, b"", OK)
    caller.read()
    assert sorted(caller.ended) == [3, 5]
    assert caller.server.unsent(1) == 100_000 + len(b"message") - DEFAULT_WINDOW


def test_frames_are_as_large_as_the_peer_takes_them() -> None:
    caller = calling(1, settings=[(INITIAL_WINDOW_SIZE, 2**30), (MAX_FRAME_SIZE, 20_000)])
    caller.say(caller.grant(0, 2**20))
    caller.server.reply(1, HEAD, bytes(50_000), OK)
    assert [len(each.payload) for each in caller.read() if each.kind == DATA] == [20_000, 20_000, 10_000]
    caller.say(caller.settings((MAX_FRAME_SIZE, DEFAULT_FRAME_SIZE)), caller.open(3, end=True))
    caller.server.reply(3, HEAD, bytes(20_000), OK)
    assert [len(each.payload) for each in caller.read() if each.kind == DATA] == [DEFAULT_FRAME_SIZE, 3616]


def test_small_replies_do_not_overtake_a_body_that_waits_for_the_connections_window() -> None:
    numbers = range(3, 23, 2)
    caller = calling(1, *numbers, settings=LARGE)
    caller.server.reply(1, HEAD, bytes(DEFAULT_WINDOW + 2000), OK)
    caller.read()
    for number in numbers:  # each in the turn in which the window opens, as a call that is answered at once
        caller.say(caller.grant(0, 1000))
        caller.server.reply(number, HEAD, bytes(1000), OK)
        caller.read()
    assert len(caller.bodies[1]) >= DEFAULT_WINDOW + 1000
    for _ in range(2):
        caller.say(caller.grant(0, 1000))
        caller.read()
    assert sorted(caller.ended) == [1, *numbers]


# -- what the peer may send --------------------------------------------------------------------------------------------


def test_what_has_been_consumed_may_be_sent_again() -> None:
    caller = RawCaller()
    opening = caller.frames[1]
    assert opening == Frame(8, 0, 0, struct.pack(">I", CONNECTION_WINDOW - DEFAULT_WINDOW))
    caller.say(caller.open(1))
    granted = 0
    for _ in range(500):
        assert len(caller.say(caller.data(1, bytes(60_000)))) == 1
        assert caller.granted(1) == granted
        caller.server.consumed(1, 60_000)
        granted += 60_000
        assert caller.granted(1) == granted
        owed = granted - (caller.granted(0) - CONNECTION_WINDOW + DEFAULT_WINDOW)
        assert 0 <= owed < CONNECTION_WINDOW // 2
    assert caller.goaways == []


def test_a_stream_may_be_granted_more_than_the_others() -> None:
    caller = RawCaller()
    caller.say(caller.open(1), caller.open(3))
    caller.server.grant(1, 2**20)
    assert (caller.granted(1), caller.granted(3)) == (2**20, 0)
    whole = [caller.data(1, bytes(2**16)) for _ in range(16)]
    assert len(caller.say(*whole, caller.data(1, bytes(DEFAULT_WINDOW), end=True))) == 17
    caller.server.consumed(1, 2**20)
    assert caller.granted(1) == 2**20  # nothing follows on it


def test_data_for_a_stream_that_is_over_costs_the_connection_nothing() -> None:
    caller = RawCaller()
    caller.say(caller.open(1))
    caller.server.reply(1, HEAD, b"", OK)
    caller.read()
    for _ in range(3 * CONNECTION_WINDOW // 2**16):
        assert caller.say(caller.data(1, bytes(2**16))) == []
    assert caller.granted(0) >= 2 * CONNECTION_WINDOW
    assert caller.granted(1) == 0
    assert caller.goaways == []
    assert len(caller.say(caller.open(3, REQUEST, end=True))) == 1
