"""The server of grpcio behind: connections to it, and what callers hear when it is away, ends or renews them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pytest

from appliance.multiplexer import served_connection, unary_server
from appliance.wire.calls import framed
from appliance.wire.http2 import DEFAULT_WINDOW, LARGEST_WINDOW
from appliance.wire.http2_server import ServerConnection, StreamData, StreamOpened
from appliance.wire.served_calls import OK, reply_headers
from testing.plain_calls import WAIT_SECS, ServerBefore, path, unary
from testing.running import eventually


class RenewingServer:
    """Instead of grpcio's: it answers each call with its number, and goes away from its connections when it is told."""

    def __init__(self, where: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(where))
        self.listener.listen()
        self.connections: list[tuple[socket.socket, ServerConnection]] = []
        self.lock = threading.Lock()
        self.calls = 0
        self.threads = [threading.Thread(target=self.accept, daemon=True)]

    def __enter__(self) -> Self:
        self.threads[0].start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in [self.listener, *[connection for connection, _ in self.connections]]:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended
        for thread in self.threads:
            thread.join()
        for each in [self.listener, *[connection for connection, _ in self.connections]]:
            each.close()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append((connection, ServerConnection()))
            self.threads.append(threading.Thread(target=self.serve, args=self.connections[-1], daemon=True))
            self.threads[-1].start()

    def serve(self, connection: socket.socket, protocol: ServerConnection) -> None:
        opened: set[int] = set()
        try:
            while data := connection.recv(2**16):
                with self.lock:
                    for event in protocol.receive(data):
                        if isinstance(event, StreamOpened):
                            opened.add(event.stream)
                        elif isinstance(event, StreamData) and event.ends and event.stream in opened:
                            self.calls += 1
                            reply = framed([b"%d" % self.calls])
                            protocol.reply(event.stream, reply_headers(()), reply, OK)
                    connection.sendall(protocol.data_to_send())
        except OSError:
            pass  # the unary server has ended it

    def go_away(self) -> None:
        """Without an end of the connections: that comes later."""
        with self.lock:
            for connection, protocol in self.connections:
                protocol.go_away()
                connection.sendall(protocol.data_to_send())


class Behind:
    """The handlers of grpcio's server."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def other(self, message: bytes, context: Any) -> bytes:
        return b"behind:" + message

    def hold(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield b"begun"
        self.release.wait(WAIT_SECS)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {"Other": unary(self.other), "Hold": grpc.stream_stream_rpc_method_handler(self.hold)}


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    yield made
    made.release.set()


@pytest.fixture
def standing(tmp_path: Path, behind: Behind) -> Iterator[ServerBefore]:
    with ServerBefore(tmp_path, {"Echo": lambda message, context: message}, behind.handlers()) as made:
        yield made


def test_where_it_is_away_callers_hear_that_nothing_is_there(tmp_path: Path) -> None:
    with ServerBefore(tmp_path, {"Echo": lambda message, context: message}, {}) as standing:
        standing.unary.behind.unlink()  # nobody has connected yet
        channel = standing.channel()
        call = channel.unary_unary(path("Other")).future(b"x", timeout=WAIT_SECS)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert call.details() == "The multiplexer is ending, or has ended this connection: try again"
        assert channel.unary_unary(path("Echo"))(b"x", timeout=WAIT_SECS) == b"x"


def test_where_it_ends_in_the_midst_callers_hear_it(standing: ServerBefore, behind: Behind) -> None:
    call = standing.channel().stream_stream(path("Hold"))(iter([b"x"]))
    assert next(call) == b"begun"
    standing.server.stop(0)
    with pytest.raises(grpc.RpcError) as failed:
        list(call)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")


def test_its_connections_are_used_again_and_few_are_kept(standing: ServerBefore) -> None:
    call = standing.channel().unary_unary(path("Other"))
    for _ in range(20):
        call(b"x", timeout=WAIT_SECS)
    assert standing.in_thread(lambda: len(standing.unary.idle)) == 1


def test_no_call_is_lost_when_it_renews_its_connections(tmp_path: Path, behind: Behind) -> None:
    """grpcio's server asks each connection to end after a second; calls of all kinds come all the time."""
    with ServerBefore(tmp_path, {}, behind.handlers(), longest_behind_secs=1) as standing:
        call = standing.channel().unary_unary(path("Other"))
        until, count = time.monotonic() + 2.5, 0
        while time.monotonic() < until:
            assert call(b"x", timeout=WAIT_SECS) == b"behind:x"
            count += 1
    assert count > 100


def test_a_connection_that_rests_and_takes_no_other_call_has_none(tmp_path: Path) -> None:
    with ServerBefore(tmp_path, {}, {}) as standing:
        standing.unary.behind.unlink()
        with RenewingServer(standing.unary.behind) as renewing:
            client = standing.client()
            assert client.answer(client.call("Other", b"x"))[1] == b"1"
            renewing.go_away()
            resting = standing.unary.idle
            eventually(lambda: standing.in_thread(lambda: not resting or resting[0].protocol.going_away))
            stream = client.call("Other", b"x")
            client.wait(lambda: stream in client.ends, secs=5)
            assert client.bodies[stream][5:] == b"2"


def test_more_calls_than_it_takes_are_refused_at_once_and_plain_ones_are_not(tmp_path: Path) -> None:
    """Each holds two descriptors: thousands of open streams took all that the process may have."""
    begun = threading.Event()

    def hold(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        begun.set()
        yield from messages

    behind = {"Hold": grpc.stream_stream_rpc_method_handler(hold)}
    with ServerBefore(tmp_path, {"Echo": lambda message, context: message}, behind) as standing:
        standing.unary.most_forwarded = 1
        channel = standing.channel()
        said = threading.Event()
        first = channel.stream_stream(path("Hold"))(iter(said.wait, True))
        assert begun.wait(WAIT_SECS)
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(path("Hold"))(iter(()), timeout=WAIT_SECS))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert channel.unary_unary(path("Echo"))(b"text", timeout=WAIT_SECS) == b"text"
        said.set()
        assert list(first) == []
        assert list(channel.stream_stream(path("Hold"))(iter([b"1"]), timeout=WAIT_SECS)) == [b"1"]


def test_who_does_not_read_many_answers_has_the_limits_of_the_server_behind(tmp_path: Path) -> None:
    """3,000 answers of 200 kB, none of them read, had 572 MB."""
    here, behind = list[bytes](), list[bytes]()

    def large(message: bytes, context: Any) -> bytes:
        here.append(message)
        return bytes(served_connection.MOST_UNREAD // 4)

    def answer(message: bytes, context: Any) -> bytes:
        behind.append(message)
        return b"behind"

    with ServerBefore(tmp_path, {"Echo": large}, {"Echo": unary(answer)}) as standing:
        client = standing.client(window=0)
        for _ in range(12):
            client.call("Echo", b"text")
        eventually(lambda: len(here) + len(behind) == 12)
        assert 4 <= len(here) <= 5
        assert standing.unary.unread <= 2 * served_connection.MOST_UNREAD


def test_what_lies_in_large_windows_and_is_not_read_counts_as_unread(tmp_path: Path) -> None:
    """49 MB waited for the socket, and none of it was counted: only what waited for windows was."""
    here, behind = list[bytes](), list[bytes]()

    def answered(answers: list[bytes]) -> Callable[[bytes, Any], bytes]:
        def answer(message: bytes, context: Any) -> bytes:
            answers.append(message)
            return bytes(200_000)

        return answer

    with ServerBefore(tmp_path, {"Echo": answered(here)}, {"Echo": unary(answered(behind))}) as standing:
        client = standing.client(window=LARGEST_WINDOW)
        client.grant(0, LARGEST_WINDOW - DEFAULT_WINDOW)
        for _ in range(300):
            client.call("Echo", b"text")
        eventually(lambda: len(here) + len(behind) == 300)
        assert len(here) < 100
        assert standing.unary.unread > served_connection.MOST_UNREAD


def test_who_reads_all_the_time_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is always more to send, nothing ever looks as if it had gone out."""
    monkeypatch.setattr(unary_server, "TICK_SECS", 0.02)
    piece, pieces, timeout_secs = 2**16, 200, 0.3

    def down(message: bytes, context: Any) -> Iterator[bytes]:
        while context.is_active():
            yield bytes(piece)

    behind = {"Down": grpc.unary_stream_rpc_method_handler(down)}
    with ServerBefore(tmp_path, {}, behind, timeout_secs=timeout_secs) as standing:
        client = standing.client(window=LARGEST_WINDOW)
        client.grant(0, LARGEST_WINDOW - DEFAULT_WINDOW)
        client.call("Down", b"")
        began = time.monotonic()
        while time.monotonic() - began < 5 * timeout_secs:
            client.socket.settimeout(WAIT_SECS)
            assert client.socket.recv(piece)
            time.sleep(timeout_secs / pieces)
