"""The unary server begins, asks its clients to connect anew, and ends; where it listens, and who may connect."""

import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.core.problems import Problem
from appliance.drivers.http2 import UNIX, Connection
from appliance.multiplexer import unary_server as unary_servers
from appliance.multiplexer.unary_server import UnaryServer, own_listener
from appliance.wire.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, WINDOW_UPDATE, frame
from appliance.wire.http2_headers import never_indexed
from testing.plain_calls import OWN_HEADERS, WAIT_SECS, ServerBefore, path, unary
from testing.running import eventually

ECHO = (":path", path("Echo")), ("content-type", "application/grpc")
CALLERS, CALL_SECS = 4, 2.5


class Calls:
    """The handlers of these tests; `Wait` is answered when `release` was called."""

    def __init__(self) -> None:
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.released = threading.Event()

    def echo(self, message: bytes, context: Any) -> bytes:
        return message

    def wait(self, message: bytes, context: Any) -> bytes:
        pair = socket.socketpair()
        self.pairs.append(pair)
        context.scheduler.wait(pair[0], select.POLLIN, WAIT_SECS)
        return b"after all: " + message

    def release(self) -> None:
        self.released.set()
        for pair in self.pairs:
            pair[1].send(b"x")

    def both(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from messages

    def plain(self) -> dict[str, Any]:
        return {"Echo": self.echo, "Wait": self.wait}

    def behind(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Echo": unary(self.echo),
            "Other": unary(self.echo),
            "Both": grpc.stream_stream_rpc_method_handler(self.both),
        }


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    for pair in made.pairs:
        for each in pair:
            each.close()


@pytest.fixture
def standing(tmp_path: Path, calls: Calls) -> Iterator[ServerBefore]:
    with ServerBefore(tmp_path, calls.plain(), calls.behind()) as made:
        yield made


def messages_until(ended: threading.Event, answered: threading.Semaphore) -> Iterator[bytes]:
    while not ended.is_set():
        assert answered.acquire(timeout=WAIT_SECS)
        yield b"m"


# -- where it listens --------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named(tmp_path: Path, calls: Calls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ServerBefore(tmp_path, {}, {}) as standing:
        port = other.getsockname()[1]
        unary = UnaryServer(standing.calls, tmp_path / "none.sock", 0, 1)
        with pytest.raises(Problem, match=f"Cannot listen on 127.0.0.1:{port}: is the port in use?") as raised:
            unary.start(tmp_path / "another.sock", "127.0.0.1", port)
        assert raised.value.code == "PORT_CONFLICT"
        assert not (tmp_path / "another.sock").exists()
        unary.loop.close()


def test_two_share_the_port_and_one_goes_on_when_the_other_ends(tmp_path: Path, calls: Calls) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with ServerBefore(tmp_path / "a", calls.plain(), {}) as staying:
        with ServerBefore(tmp_path / "b", calls.plain(), {}, port=staying.port) as ending:
            for _ in range(200):
                both = [each.in_thread(lambda each=each: len(each.unary.connections)) for each in (staying, ending)]
                if all(both):
                    break
                client = staying.client()
                assert client.answer(client.call("Echo", b"x"))[1] == b"x"
            assert all(both)
        client = staying.client()
        assert client.answer(client.call("Echo", b"x"))[1] == b"x"


def test_its_own_socket_is_for_this_user_alone(standing: ServerBefore) -> None:
    for each in (standing.own_socket, standing.unary.behind):
        found = each.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert found.st_mode & 0o077 == 0
        assert found.st_uid == os.getuid()


def test_a_successor_replaces_it_at_no_moment_is_there_none(tmp_path: Path) -> None:
    where, ended, refused = tmp_path / "own.sock", threading.Event(), list[OSError]()
    listeners = [own_listener(where)]

    def connect() -> None:
        while not ended.is_set():
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(where))
            except OSError as error:
                refused.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        for _ in range(100):
            listeners.append(own_listener(where))
    finally:
        ended.set()
        thread.join()
    assert refused == []
    assert where.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == ["own.sock"]
    for listener in listeners:
        listener.close()


def test_what_a_dead_process_left_under_its_name_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f"{os.getpid()}.unary.sock").touch()
    (tmp_path / "own.sock").touch()
    with own_listener(tmp_path / "own.sock"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "own.sock"))


def test_without_a_host_only_the_socket_is_there(tmp_path: Path, calls: Calls) -> None:
    with ServerBefore(tmp_path, calls.plain(), {}, host=None) as standing:
        assert standing.channel(internal=True).unary_unary(path("Echo"))(b"x", timeout=WAIT_SECS) == b"x"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", standing.port))


# -- connections that are asked to end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", [False, True])
def test_clients_connect_anew_without_losing_a_call(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, internal: bool
) -> None:
    """Their connections may be a twentieth of a second old, and streams that run all the time end well."""
    monkeypatch.setattr(unary_servers, "TICK_SECS", 0.02)
    until = time.monotonic() + CALL_SECS
    connections: set[int] = set()
    with ServerBefore(tmp_path, calls.plain(), calls.behind(), longest_connection_secs=0.05) as standing:
        channel = standing.channel(internal)

        def ask(number: int) -> int:
            method = channel.unary_unary(path("Other" if number % 2 else "Echo"))
            count = 0
            while time.monotonic() < until:
                assert method(b"%d" % count, timeout=WAIT_SECS) == b"%d" % count
                count += 1
            return count

        def talk() -> int:
            count = 0
            while time.monotonic() < until:
                messages = [b"%d" % number for number in range(300)]
                assert list(channel.stream_stream(path("Both"))(iter(messages), timeout=WAIT_SECS)) == messages
                count += 1
            return count

        def watch() -> int:
            while time.monotonic() < until:
                connections.update(standing.in_thread(lambda: set(map(id, standing.unary.connections))))
            return len(connections)

        with ThreadPoolExecutor(CALLERS + 2) as pool:
            running = [*[pool.submit(ask, number) for number in range(CALLERS)], pool.submit(talk), pool.submit(watch)]
            counts = [each.result() for each in running]
    assert min(counts) > 2
    print(f"calls, streams and connections: {counts}")


def block(number: int) -> bytes:
    return frame(HEADERS, END_HEADERS, number, never_indexed([*OWN_HEADERS, *ECHO]))


@pytest.mark.parametrize(
    "more",
    [
        frame(DATA, END_STREAM, 3, b"\0\0\0\0\x01x"),
        frame(WINDOW_UPDATE, 0, 3, b"\0\0\1\0"),
        frame(RST_STREAM, 0, 3, b"\0\0\0\x08"),
        frame(HEADERS, END_HEADERS | END_STREAM, 3, never_indexed([("x-last", "1")])),
    ],
    ids=["message", "window", "reset", "trailers"],
)
def test_a_call_that_crossed_the_request_to_end_disturbs_nobody(standing: ServerBefore, more: bytes) -> None:
    client = standing.client()
    running = client.open("Both")
    client.body(running, b"\0\0\0\0\x01a", ends=False)
    client.wait(lambda: client.bodies.get(running))

    def refuse_others() -> None:
        for connection in list(standing.unary.connections):
            connection.protocol.go_away()
            connection.flush()

    standing.in_thread(refuse_others)
    client.send(block(3) + more)  # not having read that
    client.wait(lambda: client.goaway)
    assert client.goaway == (running, 0)
    client.body(running, b"\0\0\0\0\x01b", ends=True)
    client.wait(lambda: running in client.ends)
    assert client.bodies[running] == b"\0\0\0\0\x01a\0\0\0\0\x01b"
    assert client.headers[running]["grpc-status"] == "0"
    client.wait_for_close()


def test_our_own_client_sees_that_its_connection_is_not_to_be_used(standing: ServerBefore) -> None:
    connection = Connection(f"{UNIX}{standing.own_socket}")
    call = connection.begin(path("Echo"), [b"x"], [])
    assert list(connection.replies(call, lambda: WAIT_SECS)) == [b"x"]
    standing.in_thread(lambda: [each.say_goodbye() for each in list(standing.unary.connections)])
    eventually(lambda: not connection.fresh())
    connection.close()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_calls_in_work_end_well_and_new_ones_go_elsewhere(standing: ServerBefore, calls: Calls) -> None:
    """Another process has the port, too; the client's call is not lost."""
    channel = standing.channel()
    call = channel.unary_unary(path("Wait")).future(b"x", timeout=WAIT_SECS)
    eventually(lambda: calls.pairs)
    stopping = threading.Thread(target=standing.unary.stop, args=(time.monotonic() + WAIT_SECS,))
    stopping.start()
    eventually(lambda: standing.in_thread(lambda: all(each.protocol.going_away for each in standing.unary.connections)))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", standing.port))
    late = channel.unary_unary(path("Echo")).future(b"late", timeout=WAIT_SECS, wait_for_ready=True)
    folder = standing.own_socket.parent / "next"
    folder.mkdir()
    with ServerBefore(folder, calls.plain(), {}, port=standing.port) as successor:
        assert late.result(WAIT_SECS) == b"late"
        assert stopping.is_alive()
        calls.release()
        assert call.result(WAIT_SECS) == b"after all: x"
        stopping.join(WAIT_SECS)
        assert not stopping.is_alive()
        assert successor.in_thread(lambda: len(successor.unary.connections)) == 1


def test_its_end_waits_no_longer_than_it_may(standing: ServerBefore, calls: Calls) -> None:
    channel = standing.channel()
    call = channel.unary_unary(path("Wait")).future(b"x", timeout=WAIT_SECS)
    eventually(lambda: calls.pairs)
    began = time.monotonic()
    standing.unary.stop(began + 0.3)
    assert 0.3 <= time.monotonic() - began < 5
    calls.release()
    assert call.result(WAIT_SECS) == b"after all: x"


def test_a_message_on_its_way_is_waited_for(standing: ServerBefore) -> None:
    client = standing.client()
    stream = client.open("Echo")
    client.body(stream, b"\0\0\0\0\x02a", ends=False)
    eventually(lambda: standing.in_thread(lambda: any(each.arriving for each in standing.unary.connections)))
    stopping = threading.Thread(target=standing.unary.stop, args=(time.monotonic() + WAIT_SECS,))
    stopping.start()
    client.wait(lambda: client.goaway)
    assert stopping.is_alive()
    client.body(stream, b"b", ends=True)
    assert client.answer(stream)[1] == b"ab"
    stopping.join(WAIT_SECS)
    assert not stopping.is_alive()


def test_what_the_server_behind_has_answered_goes_out(standing: ServerBefore) -> None:
    call = standing.channel().stream_stream(path("Both"))
    answered, ended = threading.Semaphore(1), threading.Event()
    replies = call(messages_until(ended, answered), timeout=WAIT_SECS)
    assert next(replies) == b"m"
    standing.unary.stop(time.monotonic() + 1)
    ended.set()
    answered.release()
    assert list(replies) == [b"m"]
    standing.unary.wait_for_ends(time.monotonic() + WAIT_SECS)
    eventually(lambda: not standing.in_thread(lambda: len(standing.unary.connections)))
