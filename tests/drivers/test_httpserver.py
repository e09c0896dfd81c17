"""How long a piece of a body may take, and which thread serves which client."""

import http.client
import io
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from appliance.drivers import httpserver
from appliance.drivers.httpserver import LimitedInput
from testing.running import eventually, free_ports

THREADS = 4
SERVER = f"""
import sys, threading
from appliance.drivers.httpserver import GunicornServer

def app(environ, start_response):
    thread = str(threading.get_ident()).encode()
    start_response("200 OK", [("content-length", str(len(thread)))])
    return [thread]

refusal = lambda status, what: ("text/plain", what)
GunicornServer("test", "127.0.0.1:" + sys.argv[1], 1, {THREADS}, lambda: app, refusal).run()
"""


class Limits:
    """Remembers for how many bytes time was given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @contextmanager
    def limited(self, _: Any, size: int) -> Iterator[None]:
        self.sizes.append(size)
        yield


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [
        (100, 40, 40),
        (100, 400, 100),
        (100, -1, 100),
        (None, 40, 40),  # it comes in chunks: the piece that is asked for counts
        (None, -1, 0),
        (0, 40, 0),
    ],
)
def test_a_piece_has_the_time_of_its_bytes(
    length: int | None, size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, client = Limits(), object()
    monkeypatch.setattr(httpserver, "LIMITS", limits)
    LimitedInput(io.BytesIO(bytes(1000)), client, length).read(size)  # type: ignore[arg-type]
    assert limits.sizes == [expected]


class Client:
    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ask(self) -> str:
        """The thread that answers."""
        self.connection.request("GET", "/")
        return self.connection.getresponse().read().decode()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


class Server:
    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.port)], stderr=subprocess.DEVNULL)
        eventually(self.ask, 20)

    def ask(self) -> str:
        with Client(self.port) as client:
            return client.ask()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@contextmanager
def clients_that_never_pause(server: Server, number: int) -> Iterator[list[int]]:
    """How many answers each has had so far. They end when the server closes their connection."""
    over, answers = threading.Event(), [0] * number

    def ask(at: int) -> None:
        with Client(server.port) as client, suppress(OSError, http.client.HTTPException):
            while not over.is_set():
                client.ask()
                answers[at] += 1

    clients = [threading.Thread(target=ask, args=(at,)) for at in range(number)]
    for each in clients:
        each.start()
    try:
        yield answers
    finally:
        over.set()
        for each in clients:
            each.join(20)


@pytest.mark.processes
def test_a_thread_stays_with_a_client_that_asks_again_at_once(server: Server) -> None:
    with Client(server.port) as first, Client(server.port) as second:
        threads = [(first.ask(), second.ask()) for _ in range(20)]
    assert len(set(threads)) == 1
    assert threads[0][0] != threads[0][1]


@pytest.mark.processes
def test_clients_that_never_pause_leave_threads_to_others(server: Server) -> None:
    with clients_that_never_pause(server, 3 * THREADS) as answers:
        eventually(lambda: min(answers) > 10, 20)
        for _ in range(20):
            server.ask()


@pytest.mark.processes
def test_requests_that_are_sent_together_are_answered_one_after_the_other(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client, client.makefile("rb") as answers:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        for _ in range(3):
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            head = b"".join(iter(answers.readline, b"\r\n")).lower()
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert answers.read(size).isdigit()


@pytest.mark.processes
def test_a_server_that_stops_waits_for_no_client_that_never_pauses() -> None:
    server = Server()
    with clients_that_never_pause(server, THREADS) as answers:
        eventually(lambda: min(answers) > 10, 20)
        server.process.terminate()
        assert server.process.wait(8) == 0  # its grace for requests in work is 10 s
