"""One connection: strangers who say nothing or nonsense, callers who do not read, servers that do not."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from appliance.multiplexer import forwarding, served_connection
from appliance.multiplexer import unary_server as unary_servers
from appliance.wire.http2 import DEFAULT_WINDOW, PREFACE, SETTINGS, frame
from appliance.wire.http2_headers import never_indexed
from appliance.wire.http2_streams import CONNECTION_WINDOW
from testing.plain_calls import OWN_HEADERS, WAIT_SECS, ServerBefore, path, unary
from testing.running import eventually

MIB = 2**20
WHOLE = b"\0\0\0\0\x01x"
PLAIN = ((":path", path("Echo")), ("content-type", "application/grpc"))


class Behind:
    """The handlers of grpcio's server. taken: bytes that `Slow` has read; sent: messages that `Down` has given."""

    def __init__(self) -> None:
        self.read, self.ended = threading.Event(), threading.Event()
        self.taken = self.sent = 0
        self.seen: list[str] = []

    def other(self, message: bytes, context: Any) -> bytes:
        self.seen += [value for key, value in context.invocation_metadata() if key == "x-seen"]
        return b"behind:" + message

    def down(self, message: bytes, context: Any) -> Iterator[bytes]:
        """Far more than anybody keeps."""
        context.add_callback(self.ended.set)
        for _ in range(1024):
            self.sent += 1
            yield b"x" * MIB

    def pause(self, message: bytes, context: Any) -> Iterator[bytes]:
        """All that a connection lets through at first, and later its end."""
        yield b"y" * (DEFAULT_WINDOW - 5)
        self.read.wait(WAIT_SECS)

    def slow(self, messages: Iterator[bytes], context: Any) -> bytes:
        """It reads some messages, and the others when it may."""
        for number, message in enumerate(messages):
            self.taken += len(message)
            if number == 2:
                self.read.wait(WAIT_SECS)
        return b"%d" % self.taken

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Echo": unary(self.other),
            "Other": unary(self.other),
            "Pause": grpc.unary_stream_rpc_method_handler(self.pause),
            "Down": grpc.unary_stream_rpc_method_handler(self.down),
            "Slow": grpc.stream_unary_rpc_method_handler(self.slow),
        }


def echo(message: bytes, context: Any) -> bytes:
    return b"unary:" + message


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    yield made
    made.read.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unary server that looks at its connections more often than once a second."""
    monkeypatch.setattr(unary_servers, "TICK_SECS", 0.05)


@pytest.fixture
def standing(tmp_path: Path, behind: Behind) -> Iterator[ServerBefore]:
    with ServerBefore(tmp_path, {"Echo": echo}, behind.handlers()) as made:
        yield made


@pytest.fixture
def strict(tmp_path: Path, behind: Behind) -> Iterator[ServerBefore]:
    """A caller may not read for half a second."""
    with ServerBefore(tmp_path, {"Echo": echo}, behind.handlers(), timeout_secs=0.5) as made:
        yield made


# -- what is no call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0\0\x04"],
    ids=["nothing", "half a preface", "a preface", "half a frame"],
)
def test_who_does_not_begin_is_not_waited_for(
    standing: ServerBefore, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(served_connection, "HANDSHAKE_SECS", 0.2)
    client = standing.client()  # says all that it has to
    with socket.create_connection(("127.0.0.1", standing.port)) as stranger:
        stranger.settimeout(WAIT_SECS)
        stranger.sendall(said)
        while stranger.recv(1000):  # our settings, and its end
            pass
    assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"


GREETED = PREFACE + frame(SETTINGS, 0, 0, b"")


@pytest.mark.parametrize(
    "said",
    [GREETED + b"\x02\0\0\x0a\0\0\0\0\0" + bytes(2**17 - 1), GREETED + frame(1, 0, 1, b"\x82" * 1000)],
    ids=["half a frame that nobody knows", "half of the headers of a call"],
)
def test_a_frame_whose_end_does_not_come_is_not_kept_for_ever(
    standing: ServerBefore, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """A stranger's: it counts in no budget, and there may be as many as there are descriptors."""
    monkeypatch.setattr(served_connection, "FRAME_SECS", 0.5)
    client = standing.client()
    with socket.create_connection(("127.0.0.1", standing.port)) as stranger:
        stranger.settimeout(WAIT_SECS)
        stranger.sendall(said)
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"


def test_frames_that_come_one_after_the_other_may_take_their_time(
    standing: ServerBefore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_connection, "FRAME_SECS", 2.0)
    ping = frame(6, 0, 0, bytes(8))
    with socket.create_connection(("127.0.0.1", standing.port)) as slow:
        slow.settimeout(WAIT_SECS)
        slow.sendall(GREETED + ping[:9])
        for _ in range(8):
            time.sleep(0.4)
            slow.sendall(ping[9:] + ping[:9])
        slow.sendall(ping[9:])
        answers = b""
        while answers.count(b"\0\0\x08\x06\x01") < 9:
            more = slow.recv(1000)
            assert more, "it has ended the connection"
            answers += more


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # the beginning of TLS
        b"\xff" * 100,
        PREFACE + frame(0, 0, 1, b"x"),
        PREFACE + frame(SETTINGS, 0, 0, b"x"),
        PREFACE + frame(SETTINGS, 0, 0, b"") + frame(1, 4, 1, b"\xff\xff\xff\xff\xff"),
        PREFACE + frame(SETTINGS, 0, 0, b"") + frame(5, 4, 2, b"1234"),
        PREFACE + frame(SETTINGS, 0, 0, b"") + b"\xff\xff\xff\0\0\0\0\0\0",
    ],
    ids=["HTTP/1", "TLS", "noise", "DATA first", "damaged SETTINGS", "damaged headers", "PUSH_PROMISE", "large frame"],
)
def test_what_is_no_http2_ends_its_connection(
    standing: ServerBefore, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", standing.port)) as stranger:
        stranger.settimeout(WAIT_SECS)
        stranger.sendall(said)
        try:
            while stranger.recv(1000):
                pass
        except ConnectionResetError:
            pass  # the kernel's, where it has said more than was read
    eventually(lambda: not standing.in_thread(lambda: len(standing.unary.connections)))
    client = standing.client()
    assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"
    assert caplog.text == ""


@pytest.mark.parametrize(
    "block",
    [
        never_indexed([*OWN_HEADERS, *PLAIN]) + b"\x10\x00\x01a",  # a header without a name
        never_indexed([*OWN_HEADERS, *PLAIN]) + b"\x10\x02\xffx\x01a",  # a name that is not UTF-8
        never_indexed([*OWN_HEADERS, (":path", "/\udcff"), PLAIN[1]]),
        never_indexed([*OWN_HEADERS[1:], *PLAIN, (":method", "\udcff")]),
        never_indexed([*OWN_HEADERS, PLAIN[0], ("content-type", "\udcff")]),
        never_indexed([*OWN_HEADERS[1:], *PLAIN, (":method", "GET")]),
        never_indexed([*OWN_HEADERS, PLAIN[0], ("content-type", "text/plain")]),
        never_indexed([*OWN_HEADERS, *PLAIN, ("grpc-timeout", "soon")]),
        never_indexed([*OWN_HEADERS, *PLAIN, ("x-bin", "\udcff")]),
        never_indexed([*OWN_HEADERS, *PLAIN, ("grpc-encoding", "snappy")]),
        never_indexed([*OWN_HEADERS]),
        never_indexed([(":path", path("Echo"))]),
        b"",
    ],
    ids="no-name name path method content-type GET text timeout no-base64 encoding no-path path-alone nothing".split(),
)
def test_strange_headers_end_their_call_alone(
    standing: ServerBefore, caplog: pytest.LogCaptureFixture, block: bytes
) -> None:
    """Proxies put the calls of many callers on one connection."""
    client = standing.client()
    with caplog.at_level(logging.WARNING, "asyncio"):
        stream = client.open_block(block)
        client.body(stream, WHOLE, ends=True)
        client.wait(lambda: stream in client.ends)
        assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"
    assert "Fatal error" not in caplog.text


def test_values_that_are_not_utf8_reach_the_server_behind_as_they_came(standing: ServerBefore) -> None:
    client = standing.client()
    assert client.answer(client.call("Other", b"x", ("x-seen", "\udcff")))[1] == b"behind:x"


# -- callers who do not read -------------------------------------------------------------------------------------------


def test_who_does_not_read_a_stream_holds_it_up_and_nobody_else(standing: ServerBefore, behind: Behind) -> None:
    before = psutil.Process().memory_info().rss
    reader = standing.channel(options=[("grpc.http2.lookahead_bytes", 65536)])
    stream = reader.unary_stream(path("Down"))(b"", timeout=60)
    assert len(next(stream)) == MIB
    held_up(behind)
    for channel in (reader, standing.channel()):
        assert channel.unary_unary(path("Echo"))(b"x", timeout=WAIT_SECS) == b"unary:x"
        assert channel.unary_unary(path("Other"))(b"x", timeout=WAIT_SECS) == b"behind:x"
    assert behind.sent < 20
    assert psutil.Process().memory_info().rss - before < 100 * MIB
    for _ in range(30):
        assert len(next(stream)) == MIB
    stream.cancel()
    assert behind.ended.wait(WAIT_SECS)


def held_up(behind: Behind) -> None:
    """Until nothing moves."""
    seen = [-1]

    def rests() -> bool:
        seen.append(behind.sent)
        return seen[-1] == seen[-2]

    eventually(rests, every=0.3)


def waiting_bytes(standing: ServerBefore) -> int:
    """Bytes of replies that wait in the unary server, of all connections."""
    return int(
        standing.in_thread(
            lambda: sum(
                each.protocol.unsent(number) for each in standing.unary.connections for number in each.protocol.streams
            )
        )
    )


def test_what_waits_for_such_a_caller_is_bounded(standing: ServerBefore, behind: Behind) -> None:
    client = standing.client(window=0)
    for _ in range(5):
        client.call("Down", b"")
    held_up(behind)
    assert 0 < waiting_bytes(standing) <= 5 * (forwarding.MOST_WAITING + 2 * 2**18)
    assert behind.sent < 50


def test_who_does_not_read_for_too_long_hears_it(strict: ServerBefore, behind: Behind) -> None:
    client = strict.client(window=2 * MIB)
    client.grant(0, 2 * MIB)
    stream = client.call("Down", b"")
    headers, _ = client.answer(stream)
    assert headers["grpc-status"] == "4"
    assert headers["grpc-message"].startswith("The caller does not read its answers: one has waited for ")
    assert behind.ended.wait(WAIT_SECS)
    assert client.answer(client.call("Echo", b"x"))[0]["grpc-status"] == "0"


def test_he_is_not_spared_because_he_says_that_he_lives(strict: ServerBefore) -> None:
    client = strict.client(window=0)
    stream = client.call("Down", b"")
    until = time.monotonic() + 5
    while stream not in client.ends and time.monotonic() < until:
        client.ping()
        client.wait(lambda: client.pongs > 0)
        client.pongs = 0
        client.read()
    assert client.ends.get(stream) == "trailers"


def test_he_is_not_spared_because_he_reads_the_answers_of_other_calls(strict: ServerBefore) -> None:
    client = strict.client(window=100)
    stream = client.call("Down", b"")
    until = time.monotonic() + 5
    while stream not in client.ends and time.monotonic() < until:
        assert client.answer(client.call("Echo", b"x"))[1] == b"unary:x"
        client.read()
    assert client.ends.get(stream) == "trailers"


def test_a_connection_that_takes_nothing_at_all_is_ended(strict: ServerBefore, behind: Behind) -> None:
    client = strict.client(window=2**30)
    client.grant(0, 2**30)
    client.call("Down", b"")
    eventually(lambda: not strict.in_thread(lambda: len(strict.unary.connections)))
    assert behind.ended.wait(WAIT_SECS)


def test_who_reads_slowly_is_not_ended(strict: ServerBefore, behind: Behind) -> None:
    client = strict.client(window=0)
    client.grant(0, 2**30)
    stream = client.call("Down", b"")
    for number in range(12):  # a few bytes, often enough, for longer than is allowed without any
        client.grant(stream, 1000)
        client.wait(lambda number=number: len(client.bodies.get(stream, b"")) == 1000 * (number + 1))
        threading.Event().wait(0.1)
    assert stream not in client.ends
    assert not behind.ended.is_set()


def test_the_end_of_a_call_needs_no_window(standing: ServerBefore, behind: Behind) -> None:
    """What it had to say has gone out, and has used up the window of the connection."""
    client = standing.client(window=2**30)
    stream = client.call("Pause", b"x")
    client.wait(lambda: len(client.bodies.get(stream, b"")) == DEFAULT_WINDOW)
    behind.read.set()
    client.wait(lambda: stream in client.ends, secs=5)
    assert client.headers[stream]["grpc-status"] == "0"


# -- servers that do not read ------------------------------------------------------------------------------------------


def test_a_handler_that_does_not_read_holds_up_its_caller(standing: ServerBefore, behind: Behind) -> None:
    given = []

    def messages() -> Iterator[bytes]:
        for _ in range(200):
            given.append(1)
            yield bytes(MIB)

    channel = standing.channel()
    call = channel.stream_unary(path("Slow")).future(messages(), timeout=60)
    seen = [-1]

    def rests() -> bool:
        seen.append(len(given))
        return len(given) > 3 and seen[-1] == seen[-2]

    eventually(rests, every=0.3)
    assert len(given) < 20
    assert channel.unary_unary(path("Echo"))(b"x", timeout=WAIT_SECS) == b"unary:x"
    behind.read.set()
    assert call.result(WAIT_SECS) == b"%d" % (200 * MIB)


def test_many_such_calls_leave_room_for_others_on_their_connection(standing: ServerBefore, behind: Behind) -> None:
    def messages() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(MIB // 4)

    channel = standing.channel()
    calls = [channel.stream_unary(path("Slow")).future(messages(), timeout=60) for _ in range(12)]
    backlog: list[int] = [-1]

    def rests() -> bool:
        backlog.append(standing.in_thread(lambda: sum(each.protocol.room for each in standing.unary.connections)))
        return backlog[-1] == backlog[-2] < CONNECTION_WINDOW

    eventually(rests, every=0.5)
    assert channel.unary_unary(path("Echo"))(b"x", timeout=5) == b"unary:x"
    behind.read.set()
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
