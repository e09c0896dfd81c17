"""TLS over a connected socket: what is sent arrives, however little the socket takes at once, in two threads."""

import hashlib
import random
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from appliance.files.securesocket import SecureSocket
from testing.certificates import Authority, Issued

LIMIT_SECS = 20.0
SMALL_BYTES = 4096


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "one")


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Issued:
    return authority.issue("server", ["DNS:replica.example"])


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.pem)
    return context


@contextmanager
def pair(issued: Issued, small: bool = False) -> Iterator[tuple[socket.socket, ssl.SSLSocket]]:
    """A client's plain socket, and the server's side of TLS, whose handshake runs in a thread."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.chain, issued.key_path)
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.settimeout(LIMIT_SECS)
        if small:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
    server = context.wrap_socket(theirs, server_side=True, do_handshake_on_connect=False)
    with ours, server:
        yield ours, server


def shake(server: ssl.SSLSocket) -> threading.Thread:
    def run() -> None:
        try:
            server.do_handshake()
        except OSError:
            server.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def send_all(sending: SecureSocket, data: bytes) -> None:
    """As our clients do: again with the same data, once the socket can take more."""
    poll = select.poll()
    poll.register(sending.fileno(), select.POLLOUT)
    rest = bytearray(data)
    while rest:
        try:
            del rest[: sending.send(rest, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            poll.poll(1000)


def received_by(client: SecureSocket, size: int = 2**16) -> bytes:
    """As our clients do: once more where a part has come."""
    while True:
        with suppress(BlockingIOError):
            return client.recv(size)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("small", [False, True])
def test_both_ways_at_once(authority: Authority, issued: Issued, small: bool) -> None:
    data = random.Random(1).randbytes(3_000_000)
    with pair(issued, small) as (ours, server):
        thread = shake(server)
        client = SecureSocket(ours, trusting(authority), "replica.example")
        client.handshake(LIMIT_SECS)
        thread.join()
        received: dict[str, bytes] = {}

        def read_server() -> None:
            received["server"] = read(server, len(data))

        def write_server() -> None:
            server.sendall(data[::-1])

        def read_client() -> None:
            parts, size = [], 0
            while size < len(data):
                parts.append(received_by(client))
                size += len(parts[-1])
            received["client"] = b"".join(parts)

        threads = [threading.Thread(target=each) for each in (read_server, read_client)]
        for each in threads:
            each.start()
        send_all(client, data)
        threads[0].join(LIMIT_SECS)
        write_server()  # ssl.SSLSocket takes one thread at a time
        threads[1].join(LIMIT_SECS)
        assert digest(received["server"]) == digest(data)
        assert digest(received["client"]) == digest(data[::-1])


def read(server: ssl.SSLSocket, size: int) -> bytes:
    parts: list[bytes] = []
    while sum(map(len, parts)) < size:
        parts.append(server.recv(2**16))
    return b"".join(parts)


def test_nothing_decrypted_stays_behind(authority: Authority, issued: Issued) -> None:
    """Whoever polls the socket would wait for what is there already."""
    with pair(issued) as (ours, server):
        thread = shake(server)
        client = SecureSocket(ours, trusting(authority), "replica.example")
        client.handshake(LIMIT_SECS)
        thread.join()
        ours.settimeout(None)
        for number in range(5):
            server.sendall(bytes([number]) * 1000)
        received = b""
        while len(received) < 5000:
            received += received_by(client, 10)  # of the socket; what that brought comes as a whole
            assert client.incoming.pending < 1000  # at most a part of a record
        assert received == b"".join(bytes([number]) * 1000 for number in range(5))


def test_the_end_is_no_data(authority: Authority, issued: Issued) -> None:
    with pair(issued) as (ours, server):
        thread = shake(server)
        client = SecureSocket(ours, trusting(authority), "replica.example")
        client.handshake(LIMIT_SECS)
        thread.join()
        server.sendall(b"last")
        server.close()
        assert received_by(client) == b"last"
        assert received_by(client) == b""
        assert received_by(client) == b""


@pytest.mark.parametrize("name", ["other.example", "replica.example.com", "10.0.0.1"])
def test_a_certificate_of_another_name_is_refused(authority: Authority, issued: Issued, name: str) -> None:
    with pair(issued) as (ours, server):
        thread = shake(server)
        with pytest.raises(ssl.SSLCertVerificationError):
            SecureSocket(ours, trusting(authority), name).handshake(LIMIT_SECS)
        ours.close()
        thread.join()


def test_a_certificate_of_another_authority_is_refused(issued: Issued, tmp_path: Path) -> None:
    with pair(issued) as (ours, server):
        thread = shake(server)
        with pytest.raises(ssl.SSLCertVerificationError):
            SecureSocket(ours, trusting(Authority(tmp_path, "other")), "replica.example").handshake(LIMIT_SECS)
        ours.close()
        thread.join()


def test_who_says_nothing_is_not_waited_for(authority: Authority, issued: Issued) -> None:
    with pair(issued) as (ours, _), pytest.raises(TimeoutError):
        SecureSocket(ours, trusting(authority), "replica.example").handshake(0.2)


def test_who_speaks_no_tls_is_refused(authority: Authority, issued: Issued) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ssl.SSLError):
            SecureSocket(ours, trusting(authority), "replica.example").handshake(LIMIT_SECS)


def test_a_part_of_a_record_is_not_waited_for(authority: Authority, issued: Issued) -> None:
    """A peer that sends byte by byte would keep its reader for ever; each byte is a reason to look at the clock."""
    with pair(issued) as (ours, server):
        thread = shake(server)
        client = SecureSocket(ours, trusting(authority), "replica.example")
        client.handshake(LIMIT_SECS)
        thread.join()
        server.sendall(b"first")
        assert received_by(client) == b"first"
        middle, end = socket.socketpair()
        with middle, end:
            client.plain = middle
            middle.settimeout(LIMIT_SECS)
            end.sendall(b"\x17\x03\x03")
            with pytest.raises(BlockingIOError):
                client.recv(100)


def test_a_socket_that_never_waits_shakes_hands_as_it_reads(authority: Authority, issued: Issued) -> None:
    with pair(issued) as (ours, server):
        thread = shake(server)
        ours.setblocking(False)
        client = SecureSocket(ours, trusting(authority), "replica.example")
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        sent = False
        while not sent:
            try:
                sent = client.send(b"hello") == 5
            except BlockingIOError:
                poll.poll(1000)
                with pytest.raises(BlockingIOError):
                    client.recv(2**16)
        thread.join()
        assert server.recv(100) == b"hello"
