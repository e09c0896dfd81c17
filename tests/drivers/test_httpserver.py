"""Which thread and which worker serve which client, and what a client cannot say."""

import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from testing.certificates import Authority
from testing.running import eventually, free_ports

THREADS = 4
PIECE, PIECES = 64 * 1024, 512
CHUNKED = {"Transfer-Encoding": "chunked"}
SERVER = f"""
import os, sys, threading, time
from appliance.core.tls_settings import TlsSettings
from appliance.drivers import httpserver
from appliance.drivers.httpserver import GunicornServer, worker
from appliance.drivers.tls import Certificates

port, workers, next_secs, certificate, key = sys.argv[1:]
# On a machine that is busy with other tests.
worker.YIELD_SECS, worker.NEXT_SECS, worker.STAY_SECS = 0.3, float(next_secs), 100
worker.GRACE_SECS = float(os.environ.get("GRACE_SECS", worker.GRACE_SECS))
httpserver.CONNECTIONS = int(os.environ.get("CONNECTIONS", httpserver.CONNECTIONS))

taken = []  # pieces of an answer
def app(environ, start_response):
    words = environ["wsgi.url_scheme"], environ["SCRIPT_NAME"], environ["PATH_INFO"]
    answers = {{"/": threading.get_ident(), "/worker": os.getpid(), "/taken": len(taken)}}
    time.sleep(3 if words[-1] == "/slow" else 0)
    if words[-1] == "/long":
        start_response("200 OK", [])
        return (taken.append(piece) or piece for piece in [bytes({PIECE})] * {PIECES})
    body = str(answers.get(words[-1], " ".join(words))).encode()
    start_response("200 OK", [("content-length", str(len(body)))])
    return [body]

refusal = lambda status, what: ("text/plain", what)
files = TlsSettings(cert_file=certificate, key_file=key)
tls = Certificates(files, check=print, optional_clients=True) if certificate else None
where, probes = "127.0.0.1:" + port, ("/health",)
GunicornServer("test", where, int(workers), {THREADS}, lambda: app, refusal, tls, probes=probes).run()
"""


class Client:
    def __init__(self, port: int, trusts: Authority | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        if trusts:
            context = ssl.create_default_context(cafile=str(trusts.pem))
            self.connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)

    def ask(self, path: str = "/") -> str:
        """The thread that answers, or at `/worker` the process."""
        self.connection.request("GET", path)
        return self.connection.getresponse().read().decode()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


class Server:
    """next_secs: how long a thread waits for its client's next request. authority: makes the certificate for TLS."""

    def __init__(self, workers: int = 1, next_secs: float = 5, authority: Authority | None = None) -> None:
        (self.port,) = free_ports(1)
        self.authority = authority
        shown = authority.issue(sans=["IP:127.0.0.1"]) if authority else None
        files = [str(shown.chain), str(shown.key_path)] if shown else ["", ""]
        command = [sys.executable, "-c", SERVER, str(self.port), str(workers), str(next_secs), *files]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        eventually(self.ask, 20)

    def client(self) -> Client:
        return Client(self.port, self.authority)

    def ask(self) -> str:
        with self.client() as client:
            return client.ask()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def secure(authority: Authority) -> Iterator[Server]:
    running = Server(authority=authority)
    yield running
    running.stop()


def assert_answered(answers: IO[bytes]) -> None:
    assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
    head = b"".join(iter(answers.readline, b"\r\n")).lower()
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert answers.read(size).isdigit()


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
            assert_answered(answers)


@pytest.mark.processes
def test_a_request_that_came_in_one_record_with_another_is_answered(secure: Server) -> None:
    """gunicorn reads 8,192 bytes at a time: the second request waits where no poll can see it."""
    first = b"GET / HTTP/1.1\r\nHost: a\r\nX-Padding: %s\r\n\r\n"
    first %= b"a" * (8192 - len(first % b""))
    with secure.client() as client:
        client.connection.connect()
        client.connection.sock.settimeout(3)
        with client.connection.sock.makefile("rb") as answers:
            client.connection.sock.sendall(first + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert_answered(answers)
            assert_answered(answers)


CLOSES = b"Host: a\r\nConnection: close\r\n"


@pytest.mark.processes
def test_clients_that_do_not_end_their_connections_keep_nobody_waiting(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(3 * THREADS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            client.sendall(b"GET / HTTP/1.1\r\n" + CLOSES + b"\r\n")
            with client.makefile("rb") as answers:
                assert_answered(answers)
                assert answers.read() == b""  # so the server has ended its side
        began = time.monotonic()
        server.ask()
        assert time.monotonic() - began < 1.5
        eventually(lambda: not connections(server), 20)


@pytest.mark.processes
def test_an_answer_arrives_though_nobody_has_read_the_request(server: Server) -> None:
    body = b"a" * 60_000
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client, client.makefile("rb") as answers:
        head = b"POST / HTTP/1.1\r\n" + CLOSES + b"Content-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body[:100])
        time.sleep(0.3)  # the answer is on its way before the rest of the request comes
        client.sendall(body[100:])
        time.sleep(0.3)
        assert_answered(answers)
        assert answers.read() == b""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "chunked", "kept"), [(30_000, False, True), (200_000, False, False), (3, True, False)]
)
def test_a_client_is_told_where_its_next_request_would_be_lost(
    server: Server, size: int, chunked: bool, kept: bool
) -> None:
    """The rest of a body that nobody has read is read, or the connection ends and the answer says so."""
    with Client(server.port) as client:
        body = iter([b"a" * size]) if chunked else b"a" * size
        with suppress(BrokenPipeError, ConnectionResetError):
            client.connection.request("POST", "/", body, encode_chunked=chunked, headers=CHUNKED if chunked else {})
        answer = client.connection.getresponse()
        assert answer.read().isdigit()
        assert answer.getheader("Connection") == ("keep-alive" if kept else "close")
        assert client.ask().isdigit()  # http.client connects anew where it was told so


@pytest.mark.processes
def test_clients_that_only_shake_hands_keep_nobody_waiting(authority: Authority) -> None:
    server = Server(next_secs=0.05, authority=authority)
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(server.client()) for _ in range(3 * THREADS)]
            for client in clients:
                client.connection.connect()
            began = time.monotonic()
            server.ask()
            assert time.monotonic() - began < 4  # the time limit for a request is 10 s
            assert all(client.ask() for client in clients)
    finally:
        server.stop()


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n"


@pytest.mark.processes
@pytest.mark.parametrize("sent", [10, len(HEAD) - 1, len(HEAD), len(HEAD) + 59_999])
def test_clients_that_send_a_part_of_a_request_keep_nobody_waiting(server: Server, sent: int) -> None:
    request = HEAD + b"a" * 60_000
    with ExitStack() as stack:
        clients = []
        for _ in range(3 * THREADS):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)))
            clients[-1].sendall(request[:sent])
        began = time.monotonic()
        server.ask()
        assert time.monotonic() - began < 4  # the time limit for a request is 10 s
        for client in clients:
            client.sendall(request[sent:])
            with client.makefile("rb") as answers:
                assert_answered(answers)
                client.sendall(request[:sent])  # and again on the same connection
        server.ask()
        assert time.monotonic() - began < 8


@pytest.mark.processes
def test_clients_that_send_a_part_of_a_handshake_keep_nobody_waiting(secure: Server) -> None:
    """Each is answered when it goes on."""
    with ExitStack() as stack:
        clients = []
        for _ in range(3 * THREADS):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            assert secure.authority
            context = ssl.create_default_context(cafile=str(secure.authority.pem))
            tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            hello = outgoing.read()
            client = stack.enter_context(socket.create_connection(("127.0.0.1", secure.port), timeout=10))
            client.sendall(hello[:100])
            clients.append((client, tls, incoming, outgoing, hello[100:]))
        began = time.monotonic()
        secure.ask()
        assert time.monotonic() - began < 4
        for client, tls, incoming, outgoing, rest in clients:
            client.sendall(rest)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    client.sendall(outgoing.read())
                    incoming.write(client.recv(65536))
            client.sendall(outgoing.read())


@pytest.mark.processes
@pytest.mark.parametrize("sent", [b"", HEAD[:-1], b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["new", "part", "kept"])
def test_there_is_room_for_another_client(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Who has been silent longest gives way: of those that have had their answers, too."""
    monkeypatch.setenv("CONNECTIONS", str(5 * THREADS))
    server = Server(next_secs=0.05)
    try:
        with ExitStack() as stack:
            clients = []
            for _ in range(15 * THREADS):
                clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)))
                clients[-1].sendall(sent)
            began = time.monotonic()
            server.ask()
            assert time.monotonic() - began < 4  # a silent one may stay for 10 s, or for 30 after its answer
            assert len(connections(server)) <= 5 * THREADS
    finally:
        server.stop()


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_who_asks_how_it_is_waits_for_nobody(scheme: str, authority: Authority) -> None:
    """All threads have work for 3 s, and as much waits for them."""
    with ExitStack() as stack, ThreadPoolExecutor(3 * THREADS) as threads:
        server = Server(next_secs=0.05, authority=authority if scheme == "https" else None)
        stack.callback(server.stop)
        kept = stack.enter_context(server.client())
        assert kept.ask("/health") == f"{scheme}  /health"
        slow = [stack.enter_context(server.client()) for _ in range(2 * THREADS)]
        answers = [threads.submit(each.ask, "/slow") for each in slow]
        time.sleep(0.5)
        began = time.monotonic()
        for _ in range(3):
            with server.client() as client:
                assert client.ask("/health?now").endswith("/health")
            assert kept.ask("/health").endswith("/health")
        assert time.monotonic() - began < 2
        assert not any(each.done() for each in answers)
        with server.client() as client:
            assert client.ask("/worker").isdigit()  # in its turn
        assert all(each.result() for each in answers)


@pytest.mark.processes
def test_what_a_client_waits_for_a_thread_is_not_its_own_time(
    monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    """Neither for the handshake of TLS nor for its request."""
    monkeypatch.setenv("GRACE_SECS", "1")
    server = Server(authority=authority)
    try:
        with ExitStack() as stack, ThreadPoolExecutor() as threads:
            slow = [stack.enter_context(server.client()) for _ in range(THREADS)]
            answers = [threads.submit(each.ask, "/slow") for each in slow]
            time.sleep(0.5)
            began = time.monotonic()
            assert server.ask()
            print(f"answered after {time.monotonic() - began:.1f} s")
            assert all(each.result() for each in answers)
    finally:
        server.stop()


@pytest.mark.processes
def test_a_long_answer_waits_for_its_reader_and_not_for_a_third_of_all_that_the_kernel_would_take(
    server: Server,
) -> None:
    """A piece goes out when some have been read: a client that read 100 KB a second of the 64 that it must was cut off
    after 40 s, as none went out for 12 of them."""
    with socket.socket() as client, server.client() as other:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        longest = 0
        for _ in range(PIECES // 2):
            before = int(other.ask("/taken"))
            read = 0
            while read < PIECE:
                read += len(client.recv(PIECE - read))
            time.sleep(0.005)
            longest = 0 if int(other.ask("/taken")) > before else longest + 1
            assert longest < 8, "so many pieces were read, and none was sent"


@pytest.mark.processes
def test_who_sends_byte_by_byte_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACE_SECS", "1")
    server = Server()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client, suppress(ConnectionError):
            client.setblocking(False)
            for byte in range(60):  # 6 s
                client.send(HEAD[byte : byte + 1])
                time.sleep(0.1)
                with suppress(BlockingIOError):
                    assert client.recv(1) == b""
                    break
            else:
                raise AssertionError("it is still connected")
            assert byte > 5
    finally:
        server.stop()


@pytest.mark.processes
def test_a_server_that_stops_waits_for_no_client_that_never_pauses() -> None:
    server = Server()
    with clients_that_never_pause(server, THREADS) as answers:
        eventually(lambda: min(answers) > 10, 20)
        server.process.terminate()
        assert server.process.wait(8) == 0  # its grace for requests in work is 10 s


@pytest.mark.processes
def test_a_server_that_stops_waits_for_no_client_that_says_nothing(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
        server.ask()  # so the one before was accepted
        server.process.terminate()
        assert server.process.wait(8) == 0
        assert silent.recv(1) == b""


@pytest.mark.processes
def test_a_worker_whose_master_was_killed_leaves_its_port_at_once(server: Server) -> None:
    """Though a client that says nothing is connected to it: the next server could not listen for ten seconds."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10):
        server.ask()  # so the one before was accepted
        (worker,) = psutil.Process(server.process.pid).children()
        server.process.kill()
        server.process.wait()
        eventually(lambda: not is_listening(server.port), 8)  # it was some 10 s
        worker.wait(8)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.processes
def test_no_header_changes_what_was_asked_for(server: Server) -> None:
    """gunicorn by default believes a client of this machine that a proxy sent it."""
    with Client(server.port) as client:
        told = {"X-Forwarded-Proto": "https", "SCRIPT_NAME": "/health", "PATH_INFO": "/health"}
        client.connection.request("GET", "/health/keys", headers=told)
        assert client.connection.getresponse().read() == b"http  /health/keys"


def spread(server: Server, number: int) -> Counter[str]:
    """How many of so many clients each worker has. All are connected before the first one asks."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.port)) for _ in range(number)]
        for each in clients:
            each.connection.connect()
        return Counter([each.ask("/worker") for each in clients])


def connections(server: Server) -> list[Any]:
    """Those that its workers have not closed yet."""
    workers = psutil.Process(server.process.pid).children()
    return [each for worker in workers for each in worker.net_connections("tcp") if each.status != psutil.CONN_LISTEN]


@pytest.mark.processes
def test_workers_have_equally_many_connections_also_when_one_was_killed() -> None:
    server = Server(workers=2)
    try:
        for _ in range(2):
            eventually(lambda: len(spread(server, 8)) == 2, 20)
            for _ in range(4):
                eventually(lambda: not connections(server), 20)
                assert set(spread(server, 16).values()) == {8}
            before = spread(server, 8)
            os.kill(int(min(before)), signal.SIGKILL)
            eventually(lambda before=before: set(spread(server, 8)) - set(before), 20)
    finally:
        server.stop()


@pytest.mark.processes
def test_a_server_that_ends_refuses_new_clients_at_once(server: Server) -> None:
    """They connected, waited until the last call in work had ended, and were cut off then."""
    with server.client() as busy, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(busy.ask, "/slow")
        eventually(lambda: busy.connection.sock is not None, 5)
        time.sleep(0.5)  # it is in work, for 3 s
        server.process.terminate()
        eventually(lambda: not is_listening(server.port), 2)
        assert not answer.done()
        assert answer.result(10).endswith("/slow")
