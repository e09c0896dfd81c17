"""The HTTP/2 client against a real grpc server, and against a scripted one for what a real one does only by chance.

What needs no socket is in tests/wire.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from hpack import Decoder, Encoder

from appliance.drivers.http2 import Connection, MessageStream
from appliance.wire.calls import CallFailed, ClientCall
from appliance.wire.http2 import PREFACE
from appliance.wire.http2_server import ServerConnection, StreamOpened

MIB = 2**20
LIMIT_SECS = 8.0  # no call of these tests may take longer
END_STREAM, END_HEADERS, ACK, PADDED, PRIORITY = 1, 4, 1, 8, 32


class Overdue(Exception):
    """The call did not end in time."""


def within(secs: float) -> Callable[[], float]:
    deadline = time.monotonic() + secs

    def check() -> float:
        if time.monotonic() > deadline:
            raise Overdue
        return 0.05

    return check


def call(
    connection: Connection,
    path: str,
    messages: Sequence[bytes],
    metadata: Any = (),
    careful: bool = False,
    secs: float = 0,
) -> tuple[list[bytes], ClientCall]:
    """(replies, the call)"""
    started = connection.begin(path, messages, list(metadata), careful)
    return list(connection.replies(started, within(secs or LIMIT_SECS))), started


def failure(
    connection: Connection, path: str, messages: Sequence[bytes], **options: Any
) -> tuple[list[bytes], CallFailed]:
    """(replies before it, how the call failed)"""
    check = within(options.pop("secs", LIMIT_SECS))
    started = connection.begin(path, messages, [], **options)
    found: list[bytes] = []
    with pytest.raises(CallFailed) as caught:
        found.extend(reply for reply in collecting(connection.replies(started, check), found))
    return found, caught.value


def collecting(replies: Iterator[bytes], found: list[bytes]) -> Iterator[bytes]:
    for reply in replies:
        found.append(reply)
    yield from ()


# -- a real grpc server ----------------------------------------------------------------------------------------------


class Echo(grpc.GenericRpcHandler):
    """/t/echo; /t/bad refuses the message `bad`; /t/refuse at once; /t/hang never; /t/times replies later, twice."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str | bytes]] = []
        self.seen: list[tuple[float, bytes]] = []
        self.ended = threading.Event()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(getattr(self, details.method.removeprefix("/t/")))

    def echo(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.metadata.append(dict(context.invocation_metadata()))
        context.send_initial_metadata((("x-first", "1"), ("x-first-bin", b"\x00\xff")))
        context.set_trailing_metadata((("x-last", "2"), ("x-last-bin", bytes(range(256)))))
        yield from requests

    def bad(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            if request.startswith(b"bad"):
                context.set_trailing_metadata((("x-why", "bad"), ("x-why-bin", b"\x80")))
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "zu groß: 東京 100%")
            yield request

    def refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")
        yield b""

    def hang(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(self.ended.set)
        yield from requests
        self.ended.wait(20)

    def slow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            self.seen.append((time.monotonic(), request))
            time.sleep(0.05)
            yield request

    def chatty(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield from [request] * 3


@pytest.fixture
def echo() -> Iterator[tuple[Echo, str]]:
    handler = Echo()
    options = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
    server = grpc.server(ThreadPoolExecutor(16), handlers=[handler], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    handler.ended.set()
    server.stop(0).wait()


def test_large_messages_come_back_whole(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    messages = [os.urandom(size) for size in (0, 1, 65535, 3 * MIB, 16384, 7 * MIB + 1)]
    assert call(connection, "/t/echo", messages)[0] == messages
    assert connection.idle
    connection.close()


def test_many_messages_keep_their_order_over_several_calls_on_one_connection(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    for turn in range(4):
        messages = [b"%d %d" % (turn, number) * (number % 50) for number in range(2000)]
        assert connection.fresh()
        assert call(connection, "/t/echo", messages)[0] == messages
        assert connection.idle
    connection.close()


def test_no_message_is_an_empty_call(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    assert call(connection, "/t/echo", [])[0] == []
    assert connection.idle
    connection.close()


def test_metadata_goes_both_ways_text_and_binary(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    sent = [("x-trace", "a b,c;=~"), ("x-raw-bin", bytes(range(255))), ("x-none-bin", b"")]
    for _ in range(2):  # the second time from the header table
        started = call(connection, "/t/echo", [b"1"], sent)[1]
        assert [pair for pair in started.headers if pair[0].startswith("x-")] == [
            ("x-first", "1"),
            ("x-first-bin", b"\x00\xff"),
        ]
        assert started.status
        assert started.status.trailers == [("x-last", "2"), ("x-last-bin", bytes(range(256)))]
        arrived = echo[0].metadata[-1]
        assert {key: arrived[key] for key, _ in sent} == dict(sent)
    connection.close()


@pytest.mark.parametrize("careful", [False, True])
def test_an_error_after_some_replies_keeps_its_code_words_and_trailers(echo: tuple[Echo, str], careful: bool) -> None:
    """Also when the request has not been sent to its end: grpc then adds RST_STREAM with no error."""
    for _ in range(5):
        connection = Connection(echo[1])
        found, error = failure(connection, "/t/bad", [b"1", b"2", b"bad", b"4"], one_at_a_time=careful)
        assert found == [b"1", b"2"]
        assert (error.status.code, error.status.details, error.answered) == (3, "zu groß: 東京 100%", True)
        assert dict(error.status.trailers) == {"x-why": "bad", "x-why-bin": b"\x80"}
        connection.close()


def test_an_error_while_a_large_request_is_on_its_way_keeps_its_code(echo: tuple[Echo, str]) -> None:
    for _ in range(5):
        connection = Connection(echo[1])
        found, error = failure(connection, "/t/bad", [b"bad", *[bytes(MIB)] * 8])
        assert (found, error.status.code, error.answered) == ([], 3, True)
        connection.close()


def test_a_deadline_that_the_server_notices_is_deadline_exceeded(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    started = connection.begin("/t/hang", [b"1"], [("grpc-timeout", "200m")])
    with pytest.raises(CallFailed) as caught:
        list(connection.replies(started, within(LIMIT_SECS)))
    assert caught.value.status.code == 4, caught.value.status.details
    connection.close()


def test_a_refusal_without_any_reply_leaves_the_connection_good(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    for _ in range(3):
        found, error = failure(connection, "/t/refuse", [b"1"])
        assert (found, error.status.code, error.status.details, error.answered) == ([], 8, "no", True)
        if not connection.idle:  # the server may refuse before the end of the request was on its way
            connection = Connection(echo[1])
    assert call(connection, "/t/echo", [b"1"])[0] == [b"1"]
    connection.close()


def test_an_unknown_method_is_the_servers_answer(echo: tuple[Echo, str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection = Connection(f"127.0.0.1:{port}")
    error = failure(connection, "/t/none", [b"1"])[1]
    assert (error.status.code, error.answered) == (12, True)
    connection.close()
    server.stop(0).wait()


def test_one_at_a_time_sends_the_next_only_after_the_reply(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    messages = [b"%d" % number for number in range(6)]
    assert call(connection, "/t/slow", messages, careful=True)[0] == messages
    times = [at for at, _ in echo[0].seen]
    assert all(later - sooner >= 0.045 for sooner, later in pairwise(times))
    assert connection.idle
    connection.close()


def test_one_at_a_time_with_more_replies_than_requests_still_ends(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    assert call(connection, "/t/chatty", [b"1", b"2", b"3"], careful=True)[0].count(b"3") == 3
    connection.close()


def test_abort_from_another_thread_ends_the_call_at_once_and_the_servers_too(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    started = connection.begin("/t/hang", [b"1"], [])
    threading.Timer(0.2, connection.abort, [started]).start()
    began = time.monotonic()
    with pytest.raises(CallFailed) as caught:
        list(connection.replies(started, within(LIMIT_SECS)))
    assert time.monotonic() - began < 1.5
    assert (caught.value.status.code, caught.value.answered) == (14, False)
    assert echo[0].ended.wait(5)
    assert not connection.idle


def test_abort_after_the_end_harms_no_later_call(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    started = call(connection, "/t/echo", [b"1"])[1]
    connection.abort(started)
    assert connection.fresh()
    assert call(connection, "/t/echo", [b"2"])[0] == [b"2"]
    connection.close()


def test_a_call_that_is_given_up_with_its_whole_answer_takes_its_connection_along(echo: tuple[Echo, str]) -> None:
    """As by a caller who cancels a stream behind its last reply; the call after it got a broken pipe."""
    connection = Connection(echo[1])
    started = connection.begin("/t/echo", [b"x"], [])
    replies = connection.replies(started, within(LIMIT_SECS))
    assert next(replies) == b"x"
    connection.write()  # a ping of the server may have come with the reply, and nothing can be written afterwards
    select.select([connection.socket], [], [], 0.5)  # until the status is there; it may have come with the reply
    connection.abort(started)
    assert list(replies) == []
    assert started.status is not None
    assert not connection.idle


def test_a_call_given_up_half_way_is_over_at_the_server_and_its_connection_is_not_used_again(
    echo: tuple[Echo, str],
) -> None:
    connection = Connection(echo[1])
    replies = connection.replies(connection.begin("/t/hang", [b"1"], []), within(LIMIT_SECS))
    assert next(replies) == b"1"
    replies.close()
    assert not connection.idle
    assert echo[0].ended.wait(5)


def test_check_is_asked_while_nothing_happens(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    began = time.monotonic()
    with pytest.raises(Overdue):
        list(connection.replies(connection.begin("/t/hang", [b"1"], []), within(0.3)))
    assert time.monotonic() - began < 1.0
    assert not connection.idle


SERVER = """
import sys, time
import grpc
from concurrent.futures import ThreadPoolExecutor

class Endless(grpc.GenericRpcHandler):
    def service(self, details):
        def stream(requests, context):
            for request in requests:
                yield request
            time.sleep(30)
        return grpc.stream_stream_rpc_method_handler(stream)

server = grpc.server(ThreadPoolExecutor(2), handlers=[Endless()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


@pytest.mark.processes
def test_a_server_killed_in_the_middle_is_unavailable_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout
        connection = Connection(f"127.0.0.1:{int(server.stdout.readline())}")
        replies = connection.replies(connection.begin("/t/endless", [b"1", b"2"], []), within(LIMIT_SECS))
        assert [next(replies), next(replies)] == [b"1", b"2"]
        server.kill()
        with pytest.raises(CallFailed) as caught:
            next(replies)
        assert (caught.value.status.code, caught.value.answered) == (14, False)
        assert not connection.idle


# -- messages that come one by one ------------------------------------------------------------------------------------


def streamed(stream: MessageStream, secs: float = LIMIT_SECS) -> list[bytes]:
    return list(stream.replies(within(secs)))


def test_messages_are_sent_as_they_come_and_the_connection_is_good_for_the_next_call(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    connection.wait_for_greeting(LIMIT_SECS)
    questions = iter([b"1", b"2", b"3"])
    asked: list[bytes] = []

    def messages() -> Iterator[bytes]:
        while question := next(questions, None):
            asked.append(question)
            yield question

    replies = []
    for reply in MessageStream(connection, "/t/echo", messages(), [("x-a", "b")]).replies(within(LIMIT_SECS)):
        assert reply in asked
        replies.append(reply)
    assert replies == [b"1", b"2", b"3"]
    assert connection.idle
    assert connection.fresh()
    assert call(connection, "/t/echo", [b"4"])[0] == [b"4"]
    connection.close()


def test_large_messages_of_a_stream_wait_for_the_windows_of_the_peer(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    messages = [os.urandom(size) for size in (0, 1, 65535, 3 * MIB, 16384, 7 * MIB + 1)]
    assert streamed(MessageStream(connection, "/t/echo", iter(messages), [])) == messages
    assert connection.idle
    connection.close()


def test_an_error_ends_a_stream_whose_messages_have_not_come_to_their_end(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from (b"1", b"bad")
        over.wait(LIMIT_SECS)

    stream = MessageStream(connection, "/t/bad", messages(), [])
    with pytest.raises(CallFailed) as caught:
        streamed(stream)
    assert (caught.value.status.code, caught.value.answered) == (3, True)
    assert not connection.idle
    over.set()
    stream.sender.join(LIMIT_SECS)
    assert not stream.sender.is_alive()


def test_a_stream_that_is_cancelled_ends_at_once_here_and_at_the_server(echo: tuple[Echo, str]) -> None:
    connection = Connection(echo[1])
    stream = MessageStream(connection, "/t/hang", iter([b"1"]), [])
    threading.Timer(0.2, stream.cancel).start()
    with pytest.raises(CallFailed) as caught:
        streamed(stream)
    assert (caught.value.status.code, caught.value.answered) == (14, False)
    assert echo[0].ended.wait(5)
    stream.sender.join(LIMIT_SECS)
    assert not stream.sender.is_alive()


def test_a_connection_on_which_nothing_goes_out_any_more_is_not_used_again() -> None:
    """The status of its call came all the same: the next call found a broken pipe, and its replica taken for dead."""
    asked = threading.Event()

    def script(peer: Peer) -> None:
        peer.request_end()
        asked.set()
        trailers = peer.block((":status", "200"), ("grpc-status", "0"))
        time.sleep(0.1)  # the client's side is shut by then
        peer.socket.sendall(peer.packed(1, END_HEADERS | END_STREAM, 1, trailers) + peer.packed(6, 0, 0, b"answer!!"))
        closed(peer)

    with Scripted(script) as connection:
        connection.wait_for_greeting(LIMIT_SECS)

        def shut() -> float:
            if asked.is_set():
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
            return 0.05

        assert list(MessageStream(connection, "/t/x", iter([b"1"]), []).replies(shut)) == []
        assert not connection.idle


def test_a_sender_whose_peer_takes_nothing_ends_with_its_call() -> None:
    def script(peer: Peer) -> None:
        closed(peer)

    with Scripted(script, {4: 10}) as connection:
        connection.wait_for_greeting(LIMIT_SECS)
        stream = MessageStream(connection, "/t/x", iter([bytes(MIB)]), [])
        with pytest.raises(Overdue):
            streamed(stream, 0.3)
        stream.sender.join(LIMIT_SECS)
        assert not stream.sender.is_alive()


def test_a_connection_that_is_accepted_and_ended_was_not_greeted() -> None:
    """A process that is dying has its port for a moment longer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(f"127.0.0.1:{listener.getsockname()[1]}")
        threading.Timer(0.1, lambda: listener.accept()[0].close()).start()
        with pytest.raises(OSError, match=r"closed|reset"):
            connection.wait_for_greeting(LIMIT_SECS)
        assert not connection.idle
        silent = Connection(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            silent.wait_for_greeting(0.1)


CALLS_BEFORE = 30  # after some of them Linux puts acknowledgements off


def answer_calls(peer: "Peer") -> None:
    for number in range(CALLS_BEFORE):
        peer.request_end()
        peer.reply_headers(1 + 2 * number)
        peer.end(1 + 2 * number)


def leave(peer: "Peer", how: str) -> None:
    """End the connection as a process does that ends: with what came unread it is a reset."""
    if how == "reset":
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.file.close()
    peer.socket.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("as_stream", [False, True], ids=["unary", "stream"])
def test_a_call_on_a_connection_that_had_ended_has_not_begun(how: str, as_stream: bool) -> None:
    """It may be sent again. The connection counts as alive a moment after each call."""
    may_leave = threading.Event()

    def script(peer: Peer) -> None:
        answer_calls(peer)
        may_leave.wait(LIMIT_SECS)
        leave(peer, how)

    scripted = Scripted(script)
    with scripted as connection:
        for _ in range(CALLS_BEFORE):
            call(connection, "/t/x", [b"1"])
        may_leave.set()
        scripted.thread.join(LIMIT_SECS)
        if as_stream:
            with pytest.raises(CallFailed) as caught:
                streamed(MessageStream(connection, "/t/x", iter([b"late"]), []))
            failed = caught.value
        else:
            _, failed = failure(connection, "/t/x", [b"late"])
    assert (failed.status.code, failed.answered, failed.begun) == (14, False, False)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("messages", [1, 2])
def test_a_call_that_the_peer_has_read_has_begun(how: str, messages: int) -> None:
    """Also where the peer's kernel has not said so: with a reset it never does. messages: of which it reads one."""

    def script(peer: Peer) -> None:
        answer_calls(peer)
        peer.until(lambda kind, _flags, _payload: kind == 0)
        leave(peer, how)

    with Scripted(script) as connection:
        for _ in range(CALLS_BEFORE):
            call(connection, "/t/x", [b"1"])
        _, failed = failure(connection, "/t/x", [b"late"] * messages, one_at_a_time=messages > 1)
    assert (failed.status.code, failed.answered, failed.begun) == (14, False, True)


def test_a_call_that_we_end_ourselves_may_have_begun() -> None:
    """The end that is read then is our own, and tells nothing of what the peer has."""
    got = threading.Event()

    def script(peer: Peer) -> None:
        answer_calls(peer)
        peer.request_end()
        got.set()
        closed(peer)

    with Scripted(script) as connection:
        for _ in range(CALLS_BEFORE):
            call(connection, "/t/x", [b"1"])
        started = connection.begin("/t/x", [b"late"], [])

        def check() -> float:
            if got.is_set():
                connection.abort(started)
            return 0.001

        with pytest.raises(CallFailed) as caught:
            list(connection.replies(started, check))
    assert (caught.value.answered, caught.value.begun) == (False, True)


# -- a scripted server -----------------------------------------------------------------------------------------------


class Peer:
    """The server's side of one connection, frame by frame."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(LIMIT_SECS)
        self.file = connection.makefile("rb")
        self.encoder, self.decoder = Encoder(), Decoder()
        self.body = bytearray()
        self.opening: list[tuple[int, int, int, bytes]] = []

    def start(self, settings: dict[int, int]) -> None:
        self.send(4, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings.items()))
        assert self.file.read(len(PREFACE)) == PREFACE

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.socket.sendall(self.packed(kind, flags, stream, payload))

    def packed(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def receive(self) -> tuple[int, int, int, bytes]:
        head = self.file.read(9)
        if len(head) < 9:
            raise ConnectionError
        size = int.from_bytes(head[:3], "big")
        stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
        return head[3], head[4], stream, self.file.read(size)

    def until(self, wanted: Callable[[int, int, bytes], bool]) -> tuple[int, int, int, bytes]:
        """Read until ``wanted(kind, flags, payload)``; DATA is collected in ``body``."""
        while True:
            found = self.receive()
            kind, flags, _, payload = found
            if kind == 0:
                self.body += payload
            if wanted(kind, flags, payload):
                return found

    def request_end(self) -> None:
        self.until(lambda kind, flags, _: kind == 0 and bool(flags & END_STREAM))

    def block(self, *headers: tuple[str, str]) -> bytes:
        return self.encoder.encode(headers)

    def reply_headers(self, stream: int, *headers: tuple[str, str]) -> None:
        self.send(1, END_HEADERS, stream, self.block((":status", "200"), *headers))

    def data(self, stream: int, *messages: bytes) -> None:
        self.send(0, 0, stream, b"".join(framed(message) for message in messages))

    def end(self, stream: int, *headers: tuple[str, str]) -> None:
        self.send(1, END_HEADERS | END_STREAM, stream, self.block(*(headers or [("grpc-status", "0")])))


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


class Scripted:
    """One connection answered by ``script(peer)``; its exception fails the test."""

    def __init__(self, script: Callable[[Peer], None], settings: dict[int, int] | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.script = script
        self.settings = settings or {}
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        try:
            connection, _ = self.listener.accept()
            with connection:
                peer = Peer(connection)
                peer.start(self.settings)
                self.script(peer)
        except BaseException as problem:
            self.problem = problem

    def __enter__(self) -> Connection:
        self.thread.start()
        self.connection = Connection(self.address)
        return self.connection

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        self.connection.close()
        self.thread.join(LIMIT_SECS)
        self.listener.close()
        if not error:
            assert self.problem is None, repr(self.problem)


def closed(peer: Peer) -> None:
    """Wait for the client to close."""
    try:
        while True:
            peer.receive()
    except (ConnectionError, OSError):
        return


def ping(peer: Peer) -> None:
    """Wait until the client has taken everything that was sent to it."""
    peer.send(6, 0, 0, b"12345678")
    peer.until(lambda kind, flags, _: kind == 6)


def test_a_tiny_window_that_opens_late_lets_everything_through_and_is_never_overdrawn() -> None:
    sent = os.urandom(70_000)

    def script(peer: Peer) -> None:
        granted = 10
        while len(peer.body) < len(sent) + 5:
            while len(peer.body) < min(granted, len(sent) + 5):
                peer.until(lambda kind, flags, _: kind == 0)
            ping(peer)
            assert len(peer.body) == min(granted, len(sent) + 5)
            time.sleep(0.01)
            granted += 7000
            peer.send(8, 0, 0, struct.pack(">I", 7000))
            peer.send(8, 0, 1, struct.pack(">I", 7000))
        assert bytes(peer.body[5:]) == sent
        peer.reply_headers(1)
        peer.data(1, b"ok")
        peer.end(1)
        closed(peer)

    with Scripted(script, {4: 10}) as connection:
        time.sleep(0.1)
        assert connection.fresh()  # the small window is known before the call begins
        assert call(connection, "/t/x", [sent])[0] == [b"ok"]


def test_a_large_request_is_not_slowed_down_where_the_window_is_wide_open() -> None:
    """Without a frame from the peer nothing wakes the sender but its own socket."""
    size = 8 * MIB

    def script(peer: Peer) -> None:
        peer.send(8, 0, 0, struct.pack(">I", 2**30))
        peer.request_end()
        peer.reply_headers(1)
        peer.end(1)
        closed(peer)

    with Scripted(script, {4: 2**30, 5: 2**20}) as connection:
        time.sleep(0.1)
        assert connection.fresh()
        began = time.monotonic()
        call(connection, "/t/x", [bytes(size)])
        took = time.monotonic() - began
    print(f"{size / MIB:.0f} MiB in {took:.2f} s")
    assert took < 1.0


def test_a_ping_is_answered_with_its_own_bytes_during_a_call() -> None:
    def script(peer: Peer) -> None:
        peer.request_end()
        peer.send(6, 0, 0, b"8 bytes!")
        assert peer.until(lambda kind, flags, _: kind == 6)[1:] == (ACK, 0, b"8 bytes!")
        peer.send(6, ACK, 0, b"8 bytes!")  # an answer is not answered
        peer.send(0x42, 0, 0, b"unknown frames are ignored")
        peer.reply_headers(1)
        peer.end(1)
        closed(peer)

    with Scripted(script) as connection:
        assert call(connection, "/t/x", [b"1"])[0] == []


@pytest.mark.parametrize(("number", "code"), [(7, 14), (8, 1), (2, 13)])
def test_a_reset_stream_fails_after_the_replies_that_came_before_it(number: int, code: int) -> None:
    def script(peer: Peer) -> None:
        peer.request_end()
        peer.socket.sendall(
            peer.packed(1, END_HEADERS, 1, peer.block((":status", "200")))
            + peer.packed(0, 0, 1, framed(b"one") + framed(b"two")[:3])
            + peer.packed(3, 0, 1, struct.pack(">I", number))
        )
        closed(peer)

    with Scripted(script) as connection:
        replies, error = failure(connection, "/t/x", [b"1", b"2"])
        assert (error.status.code, error.answered) == (code, False)
        assert not connection.idle
        assert replies == [b"one"]


def test_a_reset_with_no_error_behind_the_trailers_changes_nothing() -> None:
    """RFC 9113 8.1: a server that needs no more of the request says so."""

    def script(peer: Peer) -> None:
        peer.until(lambda kind, flags, _: kind == 1)
        trailers = peer.block((":status", "200"), ("grpc-status", "3"), ("grpc-message", "bad row"))
        peer.socket.sendall(
            peer.packed(1, END_HEADERS | END_STREAM, 1, trailers) + peer.packed(3, 0, 1, struct.pack(">I", 0))
        )
        closed(peer)

    with Scripted(script) as connection:
        error = failure(connection, "/t/x", [b"1", b"2"], one_at_a_time=True)[1]
        assert (error.status.code, error.status.details, error.answered) == (3, "bad row", True)


def test_goaway_lets_the_call_end_and_the_connection_is_not_used_again() -> None:
    def script(peer: Peer) -> None:
        peer.request_end()
        peer.send(7, 0, 0, struct.pack(">II", 2**31 - 1, 0))
        peer.reply_headers(1)
        peer.data(1, b"one")
        peer.end(1)
        closed(peer)

    with Scripted(script) as connection:
        assert call(connection, "/t/x", [b"1"])[0] == [b"one"]
        assert not connection.idle


def test_goaway_and_a_closed_connection_between_calls_are_noticed() -> None:
    heard = threading.Event()

    def script(peer: Peer) -> None:
        peer.request_end()
        peer.reply_headers(1)
        peer.end(1)
        heard.wait(5)
        peer.send(7, 0, 0, struct.pack(">II", 1, 0))

    with Scripted(script) as connection:
        call(connection, "/t/x", [b"1"])
        assert connection.fresh()
        heard.set()
        time.sleep(0.2)
        assert not connection.fresh()


def test_the_authority_of_a_socket_of_the_data_folder_is_localhost(tmp_path: Path) -> None:
    """Envoy ended each connection whose first call had a path for its authority, and nobody saw it."""
    where = tmp_path / "own.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(where))
        listener.listen()
        connection = Connection(f"unix:{where}")
        peer, _ = listener.accept()
        with peer:
            connection.begin("/some.Service/Method", [b"message"], [])
            assert connection.write()
            opened, *_ = ServerConnection().receive(peer.recv(65536))
        connection.close()
    assert isinstance(opened, StreamOpened)
    assert dict(opened.headers)[":authority"] == "localhost"
