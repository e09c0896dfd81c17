"""Whether processes accept HTTP/2: against a peer that does as a test says, and a real server."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from queue import Empty, SimpleQueue

import grpc
import pytest

from appliance.drivers.reachability import CONNECT_SECS, RETRY_SECS, Reachability
from appliance.wire.http2 import ACK, CONTINUATION, GOAWAY, PING, SETTINGS, frame
from testing.running import eventually

LIMIT_SECS = 8.0
GREETING = frame(SETTINGS, 0, 0, b"")


class Planted(Exception):
    """The failure of somebody who was told."""


class Watched:
    """What was told of one address."""

    def __init__(self, reachability: Reachability, port: int) -> None:
        self.told: SimpleQueue[bool] = SimpleQueue()
        self.end = reachability.watch(f"127.0.0.1:{port}", self.told.put)

    def next(self) -> bool:
        return self.told.get(timeout=LIMIT_SECS)


@pytest.fixture(scope="module")
def reachability() -> Iterator[Reachability]:
    """One that runs."""

    def run() -> None:
        while not ended.is_set():
            with suppress(Planted):
                watching.run(0.05)

    watching, ended = Reachability(), threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    yield watching
    ended.set()
    thread.join()


@contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(LIMIT_SECS)
        yield listener


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def accepted(listener: socket.socket) -> socket.socket:
    """The next connection, over which the client has said something."""
    connection = listener.accept()[0]
    connection.settimeout(LIMIT_SECS)
    assert connection.recv(4).startswith(b"PRI")
    return connection


def test_a_greeting_and_the_end_of_its_connection_are_told(reachability: Reachability) -> None:
    with listening() as listener:
        watched = Watched(reachability, port_of(listener))
        for _ in range(3):  # it connects again by itself
            with closing(accepted(listener)) as connection:
                connection.sendall(GREETING)
                assert watched.next() is True
            assert watched.next() is False
        watched.end()
    assert watched.told.empty()


def test_a_port_that_opens_later_is_found(reachability: Reachability) -> None:
    with listening() as listener:
        port = port_of(listener)
    watched = Watched(reachability, port)  # nobody listens any more
    with pytest.raises(Empty):
        watched.told.get(timeout=0.5)
    with listening(port) as listener, closing(accepted(listener)) as connection:
        connection.sendall(GREETING)
        assert watched.next() is True
        watched.end()


def test_who_accepts_a_connection_and_says_nothing_is_not_told(reachability: Reachability) -> None:
    with listening() as silent, listening() as speaking:
        watched, other = Watched(reachability, port_of(silent)), Watched(reachability, port_of(speaking))
        with closing(accepted(silent)), closing(accepted(speaking)) as connection:
            connection.sendall(GREETING)
            assert other.next() is True
            assert watched.told.empty(), "a process that hangs is not there"
            watched.end()
            other.end()


@pytest.mark.parametrize("words", [frame(GOAWAY, 0, 0, bytes(8)), frame(CONTINUATION, 0, 1, b"")])
def test_one_that_goes_away_or_breaks_the_protocol_counts_as_ended(reachability: Reachability, words: bytes) -> None:
    with listening() as listener:
        watched = Watched(reachability, port_of(listener))
        with closing(accepted(listener)) as connection:
            connection.sendall(GREETING)
            assert watched.next() is True
            connection.sendall(words)
            assert watched.next() is False
        watched.end()


def test_a_ping_is_answered(reachability: Reachability) -> None:
    with listening() as listener:
        watched = Watched(reachability, port_of(listener))
        with closing(accepted(listener)) as connection:
            connection.sendall(GREETING + frame(PING, 0, 0, b"pingping"))
            answer, read = frame(PING, ACK, 0, b"pingping"), b""
            while answer not in read:
                piece = connection.recv(4096)
                assert piece, "the connection ended without an answer"
                read += piece
        watched.end()


def test_nothing_is_told_behind_the_end_of_a_watch(reachability: Reachability) -> None:
    with listening() as listener:
        watched = Watched(reachability, port_of(listener))
        with closing(accepted(listener)) as connection:
            connection.sendall(GREETING)
            assert watched.next() is True
            watched.end()
            watched.end()  # to end it again does nothing
            while connection.recv(4096):  # until it is closed
                pass
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert watched.told.empty()


def test_who_is_told_and_fails_stops_no_other(reachability: Reachability) -> None:
    def fail(accepted: bool) -> None:
        failed.set()
        raise Planted

    failed = threading.Event()
    with listening() as first, listening() as second:
        end = reachability.watch(f"127.0.0.1:{port_of(first)}", fail)
        with closing(accepted(first)) as connection:
            connection.sendall(GREETING)
            assert failed.wait(LIMIT_SECS)
        end()
        watched = Watched(reachability, port_of(second))
        with closing(accepted(second)) as connection:
            connection.sendall(GREETING)
            assert watched.next() is True
        watched.end()


def test_a_real_server_is_found_and_lost(reachability: Reachability) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    watched = Watched(reachability, port)
    server.start()
    assert watched.next() is True
    server.stop(0).wait()
    assert watched.next() is False
    watched.end()


def test_many_are_watched_by_one_thread(reachability: Reachability) -> None:
    before = set(threading.enumerate())
    with listening() as listener:
        listener.listen(200)
        watched = [Watched(reachability, port_of(listener)) for _ in range(100)]
        connections = [accepted(listener) for _ in watched]
        for connection in connections:
            connection.sendall(GREETING)
        assert all(each.next() for each in watched)
        assert set(threading.enumerate()) <= before
        for each, connection in zip(watched, connections, strict=True):
            each.end()
            connection.close()
    eventually(lambda: not reachability.unconnected)


def test_a_machine_that_drops_packets_is_asked_again_sooner_than_the_kernel_asks() -> None:
    """A listener whose queue is full drops them, too."""
    with listening() as listener:
        listener.listen(0)
        port = port_of(listener)
        with ExitStack() as stack:
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
            watching = Reachability()
            end = watching.watch(f"127.0.0.1:{port}", lambda accepted: None)
            asked = set()
            for _ in range(3):
                watching.run(0.05)
                (key,) = watching.selector.get_map().values()
                asked.add(socket.socket.getsockname(key.fileobj))  # type: ignore[arg-type]
                watching.run(CONNECT_SECS + RETRY_SECS)
            assert len(asked) == 3
            end()
            watching.run(0.05)
            assert not watching.selector.get_map()
            assert not watching.connecting | watching.unconnected
