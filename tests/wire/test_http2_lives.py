"""How streams and connections of an HTTP/2 server begin and end otherwise than by a reply."""

from appliance.wire.http2 import (
    ACK,
    DEFAULT_WINDOW,
    LARGEST_STREAM,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from appliance.wire.http2_server import (
    MOST_STREAMS,
    OUR_FRAME_SIZE,
    REFUSED_STREAM,
    ServerConnection,
    StreamCancelled,
    StreamData,
    StreamOpened,
)
from tests.wire.callers import REQUEST, RawCaller
from tests.wire.peers import Frame

# -- streams that end otherwise ----------------------------------------------------------------------------------------


def test_a_reset_is_an_event_once_and_whatever_waited_is_dropped() -> None:
    caller = RawCaller()
    caller.say(caller.open(1, end=True), caller.open(3))
    caller.server.reply(1, ((":status", "200"),), bytes(100_000), (("grpc-status", "0"),))
    caller.read()
    assert caller.say(caller.reset(1, 8), caller.reset(3, 5)) == [StreamCancelled(1, 8), StreamCancelled(3, 5)]
    assert caller.say(caller.reset(1, 8), caller.data(3, b"late"), caller.grant(1, 100_000)) == []
    caller.say(caller.grant(0, 100_000))
    assert caller.read() == []
    assert (caller.server.streams, caller.server.waiting) == ({}, {})
    assert caller.goaways == []


def test_data_and_headers_behind_the_end_end_the_stream_alone() -> None:
    caller = RawCaller()
    caller.say(*[caller.open(stream, end=stream < 5) for stream in (1, 3, 5, 7)])
    wrong = (caller.data(1, b"more"), caller.open(3, end=True), caller.open(5, (("x-no-trailers", "1"),)))
    errors = [StreamCancelled(1, 5), StreamCancelled(3, 5), StreamCancelled(5, 1)]
    assert caller.say(*wrong, caller.data(7, b"fine")) == [*errors, StreamData(7, b"fine", 4, False)]
    caller.read()
    assert (caller.resets, caller.goaways) == ({1: 5, 3: 5, 5: 1}, [])
    assert list(caller.server.streams) == [7]


def test_more_streams_than_were_allowed_are_refused_and_those_that_are_open_go_on() -> None:
    caller = RawCaller()
    last = 2 * MOST_STREAMS - 1
    assert len(caller.say(*[caller.open(stream) for stream in range(1, last + 1, 2)])) == MOST_STREAMS
    late = (caller.open(last + 2, (*REQUEST, ("x-new", "1"))), caller.data(last + 2, b"for it"))
    assert caller.say(*late, caller.data(1, b"x")) == [StreamData(1, b"x", 1, False)]
    caller.read()
    assert (caller.resets, caller.goaways) == ({last + 2: REFUSED_STREAM}, [])
    caller.say(caller.reset(3))
    (opened,) = caller.say(caller.open(last + 4, (*REQUEST, ("x-new", "1"))))  # whose table has the refused one's field
    assert opened == StreamOpened(last + 4, (*REQUEST, ("x-new", "1")), False)


def test_the_greatest_number_of_a_stream_is_one() -> None:
    caller = RawCaller()
    assert caller.say(caller.open(LARGEST_STREAM, end=True)) == [StreamOpened(LARGEST_STREAM, REQUEST, True)]
    caller.server.reply(LARGEST_STREAM, ((":status", "200"),), b"x", (("grpc-status", "0"),))
    caller.read()
    assert caller.ended == [LARGEST_STREAM]


# -- the connection ----------------------------------------------------------------------------------------------------


def test_a_connection_begins_with_its_limits_and_its_window() -> None:
    first, second, third = RawCaller().frames
    assert (first.kind, first.flags) == (SETTINGS, 0)
    pairs = [(first.payload[at : at + 2], first.payload[at + 2 : at + 6]) for at in range(0, len(first.payload), 6)]
    told = {int.from_bytes(key, "big"): int.from_bytes(value, "big") for key, value in pairs}
    assert told == {3: MOST_STREAMS, 5: OUR_FRAME_SIZE, 6: 2**15}
    assert (second.kind, second.stream) == (WINDOW_UPDATE, 0)
    assert third == Frame(SETTINGS, ACK, 0, b"")


def test_it_is_greeted_by_the_first_settings_and_not_by_the_preface() -> None:
    server = ServerConnection()
    states = [server.greeted]
    for raw in (PREFACE, frame(SETTINGS, 0, 0, b"")):
        server.receive(raw)
        states.append(server.greeted)
    assert states == [False, False, True]


def test_a_ping_is_answered_with_its_own_bytes_and_an_answer_is_not() -> None:
    caller = RawCaller()
    assert caller.say(frame(PING, 0, 0, b"8 bytes!"), frame(PING, ACK, 0, b"8 bytes?")) == []
    assert caller.read() == [Frame(PING, ACK, 0, b"8 bytes!")]
    assert caller.say(frame(SETTINGS, ACK, 0, b""), frame(0x42, 0xFF, 1, b"unknown"), caller.settings((99, 1))) == []
    assert caller.read() == [Frame(SETTINGS, ACK, 0, b"")]


def test_after_a_goodbye_no_stream_is_taken_and_those_that_run_go_on() -> None:
    """What was on its way meanwhile, the headers of a call and all that follows them, is no error: the client learns
    from the goodbye that nobody has looked at it (RFC 9113, 6.8)."""
    caller = RawCaller()
    caller.say(caller.open(1), caller.open(3))
    caller.server.go_away()
    late = (caller.open(5, (*REQUEST, ("x-new", "1"))), caller.data(5, b"late"), caller.grant(5, 9), caller.reset(5))
    events = caller.say(*late, caller.open(7, end=True), caller.open(3, (("x-new", "1"),), end=True))
    assert events == [StreamData(3, b"", 0, True)]
    caller.server.reply(1, ((":status", "200"),), b"one", (("grpc-status", "0"),))
    caller.server.reply(3, ((":status", "200"),), b"three", (("grpc-status", "0"),))
    caller.read()
    assert (caller.goaways, sorted(caller.ended)) == ([(3, 0)], [1, 3])
    assert (caller.bodies[1], caller.bodies[3]) == (b"one", b"three")
    assert RST_STREAM not in [each.kind for each in caller.frames if each.stream in (3, 5, 7)]


def test_what_comes_late_behind_a_goodbye_costs_the_connections_window_nothing() -> None:
    caller = RawCaller()
    caller.say(caller.open(1))
    caller.server.go_away()
    caller.say(caller.open(3))
    for _ in range(400):
        assert caller.say(caller.data(3, bytes(DEFAULT_WINDOW))) == []
        caller.read()
    assert caller.goaways == [(1, 0)]
