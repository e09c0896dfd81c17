"""Plain unary calls are answered in one thread, as grpcio would answer them; what would wait is not."""

import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.core.problems import Kind, Problem
from appliance.drivers.grpccalls import AuthenticationInterceptor
from appliance.drivers.grpcserver import Server
from appliance.drivers.http2 import UNIX, Connection
from appliance.drivers.memory import Reserve
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.unary_calls import UnaryCalls
from appliance.wire.calls import CallFailed
from testing.plain_calls import LIMIT, OPTIONS, SERVICE, WAIT_SECS, ServerBefore, path, unary
from testing.running import eventually, free_ports

LARGEST = 300_000  # bytes of a reply
LENT = 2**20
LONG_SECS = 30.0
SLACK_SECS = 0.5  # grpcio rounds what is left up, by one in a hundred at most
FOR_EVER_SECS = 1e9  # what grpcio says where there is no deadline is more (1.85)
METADATA = (("x-one", "1"), ("x-two-bin", b"\x00\xff"), ("x-one", "another"))


class Answering:
    """The handlers of these tests, which do the same wherever they run; `threads` tells where that was."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}
        self.seen: dict[str, Any] = {}
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.ended = threading.Event()
        self.can_wait = True

    def note(self, method: str) -> None:
        self.threads[method] = threading.current_thread().name

    def echo(self, message: bytes, context: Any) -> bytes:
        self.note("Echo")
        self.seen["metadata"] = [tuple(pair) for pair in context.invocation_metadata()]
        self.seen["left"] = context.time_remaining()
        self.seen["peer"] = context.peer()
        context.send_initial_metadata((("x-first", "yes"), ("x-first-bin", b"\x01\xfe")))
        context.set_trailing_metadata((("x-last", "no"), ("x-last-bin", b"\xfe\x01")))
        return message

    def refuse(self, message: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x-tei-code", "NOPE"), ("x-raw-bin", b"\x00")))
        context.abort(grpc.StatusCode.NOT_FOUND, message.decode())
        raise AssertionError

    def fail(self, message: bytes, context: Any) -> bytes:
        raise ValueError("no such thing: 7 %\n")

    def large(self, message: bytes, context: Any) -> bytes:
        return b"x" * int(message)

    def block(self, message: bytes, context: Any) -> bytes:
        self.note("Block")
        self.seen["left"] = context.time_remaining()
        if threading.current_thread().name == "unary":
            time.sleep(0.6)
            raise WouldBlock
        return b"behind: " + message

    def wait(self, message: bytes, context: Any) -> bytes:
        """For a byte on the pair that it opens."""
        pair = socket.socketpair()
        context.add_callback(self.ended.set)
        self.pairs.append(pair)
        began = time.monotonic()
        context.scheduler.wait(pair[0], select.POLLIN, float(message))
        self.seen["waited"] = time.monotonic() - began
        try:
            return pair[0].recv(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b"time over"

    def handlers(self) -> dict[str, Any]:
        names = ("echo", "refuse", "fail", "large", "block", "wait")
        return {name.capitalize(): getattr(self, name) for name in names}


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering()
    yield made
    for pair in made.pairs:
        for each in pair:
            each.close()


def refuse_strangers(path: str, context: Any) -> None:
    if ("x-key", "wrong") in context.invocation_metadata():
        raise Problem(Kind.UNAUTHENTICATED, "UNAUTHENTICATED", "Who are you?")


@pytest.fixture
def standing(tmp_path: Path, answering: Answering) -> Iterator[ServerBefore]:
    behind = {name: unary(handler) for name, handler in answering.handlers().items()}
    plain = answering.handlers()
    with ServerBefore(tmp_path, plain, behind, authenticate=refuse_strangers, largest=LARGEST, lent=LENT) as made:
        yield made


@pytest.fixture
def grpcios(answering: Answering) -> Iterator[grpc.Channel]:
    """The same handlers, as the multiplexer's own server of grpcio has them."""
    server = Server(8, LARGEST, False, [AuthenticationInterceptor(refuse_strangers, LARGEST)])
    server.add(SERVICE, {name: unary(handler) for name, handler in answering.handlers().items()})
    (port,) = free_ports(1)
    server.start("127.0.0.1", port)
    with grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        yield channel
    server.stop(0)


def outcome(channel: grpc.Channel, method: str, message: bytes, metadata: Any = ()) -> tuple[Any, ...]:
    """All that a caller sees of a call: headers, reply or status and words, trailers."""
    call = channel.unary_unary(path(method)).future(message, timeout=WAIT_SECS, metadata=metadata)
    reply = None if call.exception() else call.result()
    headers, trailers = call.initial_metadata(), call.trailing_metadata()
    return reply, call.code(), call.details(), sorted(map(tuple, headers)), sorted(map(tuple, trailers))


def test_a_plain_call_is_answered_in_the_thread_of_the_unary(standing: ServerBefore, answering: Answering) -> None:
    assert standing.channel().unary_unary(path("Echo"))(b"hello", timeout=WAIT_SECS) == b"hello"
    assert answering.threads == {"Echo": "unary"}
    assert answering.seen["peer"].startswith("ipv4:127.0.0.1:")
    assert WAIT_SECS - 5 < answering.seen["left"] < WAIT_SECS + SLACK_SECS
    assert standing.channel(internal=True).unary_unary(path("Echo"))(b"") == b""
    assert answering.seen["peer"].startswith("unix:")
    assert answering.seen["left"] is None


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Echo", b"hello"),
        ("Echo", b""),
        ("Refuse", b"not here"),
        ("Refuse", b""),
        ("Refuse", "100 % of Zürich \U0001f600 \t~\x7f\r\n.".encode()),
        ("Fail", b"x"),
        ("Large", b"16384"),
        ("Large", str(LARGEST).encode()),
        ("Large", str(LARGEST + 1).encode()),
    ],
)
def test_its_caller_sees_what_grpcio_would_have_said(
    standing: ServerBefore, grpcios: grpc.Channel, method: str, message: bytes
) -> None:
    ours = outcome(standing.channel(), method, message, METADATA)
    assert ours == outcome(grpcios, method, message, METADATA)


def test_a_handler_is_told_the_metadata_that_grpcio_would_tell(
    standing: ServerBefore, grpcios: grpc.Channel, answering: Answering
) -> None:
    outcome(standing.channel(), "Echo", b"x", METADATA)
    ours, where = answering.seen["metadata"], answering.threads["Echo"]
    outcome(grpcios, "Echo", b"x", METADATA)
    assert sorted(map(str, ours)) == sorted(map(str, answering.seen["metadata"]))
    assert where == "unary" != answering.threads["Echo"]


def test_a_caller_who_is_not_admitted_hears_it_and_sends_no_message(standing: ServerBefore) -> None:
    client = standing.client()
    stream = client.open("Echo", ("x-key", "wrong"))
    headers, _ = client.answer(stream)
    assert (headers["grpc-status"], headers["grpc-message"]) == ("16", "Who are you?")
    assert headers["x-tei-code"] == "UNAUTHENTICATED"
    assert client.granted.get(stream, 0) == 0
    client.body(stream, b"\0\0\0\0\x05hello", ends=True)  # it was on its way
    assert client.answer(client.call("Echo", b"again"))[1] == b"again"


def test_grpcio_refuses_a_stranger_in_the_same_words(standing: ServerBefore, grpcios: grpc.Channel) -> None:
    stranger = (("x-key", "wrong"),)
    assert outcome(standing.channel(), "Echo", b"x", stranger) == outcome(grpcios, "Echo", b"x", stranger)


def test_an_error_of_a_handler_ends_its_own_call_alone(
    standing: ServerBefore, answering: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    channel = standing.channel()
    waiting = channel.unary_unary(path("Wait")).future(b"20")
    eventually(lambda: answering.pairs)
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(path("Fail"))(b"x", timeout=WAIT_SECS)
    assert failed.value.code() is grpc.StatusCode.UNKNOWN
    assert "A call of /test.Plain/Fail failed" in caplog.text
    answering.pairs[0][1].send(b"there")
    assert waiting.result(WAIT_SECS) == b"there"
    assert len(standing.unary.connections) == 1


def test_a_call_that_would_block_begins_anew_behind_with_the_time_that_is_left(
    standing: ServerBefore, answering: Answering
) -> None:
    assert standing.channel().unary_unary(path("Block"))(b"x", timeout=LONG_SECS) == b"behind: x"
    assert answering.threads["Block"] != "unary"
    assert LONG_SECS - 10 < answering.seen["left"] <= LONG_SECS - 0.3


def test_one_without_a_deadline_has_none_behind(standing: ServerBefore, answering: Answering) -> None:
    assert standing.channel().unary_unary(path("Block"))(b"x") == b"behind: x"
    assert answering.seen["left"] > FOR_EVER_SECS


def test_calls_wait_side_by_side_and_are_answered_in_the_order_of_their_replies(
    standing: ServerBefore, answering: Answering
) -> None:
    channel, done = standing.channel(), list[bytes]()
    for number in range(3):
        call = channel.unary_unary(path("Wait")).future(b"20")
        call.add_done_callback(lambda call: done.append(call.result()))
        eventually(lambda number=number: len(answering.pairs) == number + 1)
    for number in (2, 0, 1):
        answering.pairs[number][1].send(str(number).encode())
        eventually(lambda number=number: str(number).encode() in done)
    assert done == [b"2", b"0", b"1"]


def test_a_wait_is_over_with_its_time(standing: ServerBefore, answering: Answering) -> None:
    assert standing.channel().unary_unary(path("Wait"))(b"0.2", timeout=WAIT_SECS) == b"time over"
    assert answering.seen["waited"] >= 0.2
    assert standing.in_thread(lambda: standing.calls.waits.waiting) == {}  # type: ignore[attr-defined]


def test_a_descriptor_is_waited_for_again(tmp_path: Path) -> None:
    pair = socket.socketpair()

    def twice(message: bytes, context: Any) -> bytes:
        found = b""
        for _ in range(2):
            context.scheduler.wait(pair[0], select.POLLIN, WAIT_SECS)
            found += pair[0].recv(1)
        return found

    with pair[0], pair[1], ServerBefore(tmp_path, {"Twice": twice}, {}) as standing:
        pair[1].send(b"ab")
        assert standing.channel().unary_unary(path("Twice"))(b"", timeout=WAIT_SECS) == b"ab"


@pytest.mark.parametrize("end", ["cancel", "break"])
def test_callbacks_are_called_when_the_caller_has_gone(standing: ServerBefore, answering: Answering, end: str) -> None:
    client = standing.client()
    stream = client.call("Wait", b"20")
    eventually(lambda: answering.pairs)
    assert not answering.ended.is_set()
    if end == "cancel":
        client.reset(stream)
    else:
        client.close()
    assert answering.ended.wait(WAIT_SECS)


def test_callbacks_are_called_when_the_answer_has_gone_out(standing: ServerBefore, answering: Answering) -> None:
    client = standing.client()
    stream = client.call("Wait", b"20")
    eventually(lambda: answering.pairs)
    answering.pairs[0][1].send(b"x")
    assert client.answer(stream)[1] == b"x"
    assert answering.ended.wait(WAIT_SECS)


def test_whose_caller_has_gone_may_be_answered_all_the_same(
    standing: ServerBefore, answering: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    client = standing.client()
    for _ in range(10):
        client.call("Wait", b"20")
    eventually(lambda: len(answering.pairs) == 10)
    client.close()
    assert answering.ended.wait(WAIT_SECS)
    for _, peer in answering.pairs:
        peer.send(b"too late")
    eventually(lambda: standing.in_thread(lambda: not standing.calls.waits.waiting))  # type: ignore[attr-defined]
    assert caplog.text == ""


def test_memory_for_a_large_reply_is_given_back_when_it_has_gone_out(
    standing: ServerBefore, answering: Answering
) -> None:
    """Three of these replies fit into the memory that there is."""
    reader, window = standing.client(window=0), 10 * LARGEST
    streams = [reader.call("Large", str(LARGEST).encode()) for _ in range(4)]
    headers, _ = reader.answer(streams[3])
    assert headers["grpc-status"] == "8"
    assert headers["x-tei-code"] == "OUT_OF_MEMORY" or "memory" in headers["grpc-message"].lower()
    reader.grant(0, window)
    for stream in streams[:3]:
        reader.grant(stream, window)
        assert len(reader.answer(stream)[1]) == LARGEST
    reader.grant(0, window)
    again = reader.call("Large", str(LARGEST).encode())
    reader.grant(again, window)
    assert len(reader.answer(again)[1]) == LARGEST


def test_our_own_client_is_answered_call_after_call_on_one_connection(standing: ServerBefore) -> None:
    connection = Connection(f"{UNIX}{standing.own_socket}")
    for number in range(5):
        call = connection.begin(path("Echo"), [b"%d" % number], [])
        assert list(connection.replies(call, lambda: WAIT_SECS)) == [b"%d" % number]
        assert ("x-first", "yes") in call.headers
        assert call.status
        assert ("x-last-bin", b"\xfe\x01") in call.status.trailers
        assert connection.idle
    call = connection.begin(path("Refuse"), ["nö".encode()], [])
    with pytest.raises(CallFailed) as failed:
        list(connection.replies(call, lambda: WAIT_SECS))
    assert failed.value.status[:2] == (5, "nö")
    assert failed.value.answered
    connection.close()


def test_which_calls_are_taken() -> None:
    calls = UnaryCalls({path("Echo"): lambda message, context: message}, refuse_strangers, Reserve(LIMIT), LIMIT)
    assert calls.takes("/test.Plain/Echo")
    assert not calls.takes("/test.Plain/Other")


def test_what_begins_anew_does_not_when_nobody_waits_for_it(tmp_path: Path) -> None:
    """A client that timed out and came back had its calls computed twice, the first time for nobody."""
    behind = list[bytes]()
    cancelled = threading.Event()

    def blocked(message: bytes, context: Any) -> bytes:
        context.add_callback(cancelled.set)
        context.call.connection.transport.abort()
        context.call.end()  # as soon as the loop sees it; a call at a replica ends so, and would be tried again
        raise WouldBlock

    def answer(message: bytes, context: Any) -> bytes:
        behind.append(message)
        return b"behind"

    with ServerBefore(tmp_path, {"Echo": blocked}, {"Echo": unary(answer)}) as standing:
        client = standing.client()
        client.call("Echo", b"text")
        assert cancelled.wait(WAIT_SECS)
        client.wait_for_close()
        eventually(lambda: not standing.unary.connections)
        assert (standing.unary.forwarded, behind) == (0, [])
