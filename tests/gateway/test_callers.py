"""Clients that leave in the middle of a batch, and those that only have nothing more to say."""

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from appliance.gateway.client_watch import ClientWatch
from testing.certificates import Authority
from testing.fake_multiplexer import FakeMultiplexer, Gateway

NOTICED_SECS = 5.0
BODY = json.dumps({"inputs": ["a", "b"]}).encode()
REQUEST = (
    b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def pair() -> tuple[socket.socket, socket.socket]:
    """(client, server's side) of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        return client, listener.accept()[0]


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("unread", [b"", b"GET / HTTP/1.1"])
def test_a_client_that_is_gone_is_noticed_whatever_it_has_still_said(
    leave: Callable[[socket.socket], None], unread: bytes
) -> None:
    client, server = pair()
    gone = threading.Event()
    with closing(server), ClientWatch().cancelling_when_gone(server, gone.set):
        client.sendall(unread)
        leave(client)
        assert gone.wait(NOTICED_SECS)


def test_a_client_that_has_ended_its_side_is_there_until_it_leaves() -> None:
    """What it is asked with does not reach what it reads."""
    client, server = pair()
    gone = threading.Event()
    watch = ClientWatch()
    with closing(client), closing(server), watch.cancelling_when_gone(server, gone.set):
        client.shutdown(socket.SHUT_WR)
        for later in range(10):
            assert not watch.pop_gone(time.monotonic() + 100 * later)
        server.sendall(b"answer")
        assert client.recv(100) == b"answer"
        client.close()
        assert watch.pop_gone(time.monotonic() + 2000)


def test_a_socket_that_cannot_be_looked_at_does_not_end_the_watch_over_the_others() -> None:
    watch, wrong, gone = ClientWatch(), threading.Event(), threading.Event()

    def failing() -> None:
        wrong.set()
        raise RuntimeError("on purpose")

    client, server = pair()
    other, others = pair()
    with (
        closing(server),
        closing(others),
        watch.cancelling_when_gone(others, failing),
        watch.cancelling_when_gone(server, gone.set),
    ):
        with watch.cancelling_when_gone("no socket", failing):  # type: ignore[arg-type]
            other.close()
            assert wrong.wait(NOTICED_SECS)
            client.close()
            assert gone.wait(NOTICED_SECS)


# -- through the whole gateway ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "Callers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callers")


@pytest.fixture
def multiplexer(folder: Path) -> Iterator[FakeMultiplexer]:
    running = FakeMultiplexer(folder / "multiplexer-0.sock")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def gateways(folder: Path, authority: Authority) -> Iterator[dict[str, Gateway]]:
    issued = authority.issue("localhost", ["DNS:localhost"])
    tls = f"[tls]\ncert_file = '{issued.chain}'\nkey_file = '{issued.key_path}'\n"
    instance = {"name": "a", "model_id": "org/a"}
    running = {"plain": Gateway(folder, [instance]), "tls": Gateway(folder, [instance], tls)}
    yield running
    for gateway in running.values():
        gateway.close()


def connected(gateway: Gateway, authority: Authority | None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", gateway.port), timeout=20)
    if authority is None:
        return plain
    return ssl.create_default_context(cafile=str(authority.pem)).wrap_socket(plain, server_hostname="localhost")


def goodbye(client: socket.socket) -> None:
    """As TLS has it: its last words first, which nobody on the other side reads."""
    assert isinstance(client, ssl.SSLSocket)
    client.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    client.close()


@pytest.mark.parametrize(
    ("language", "leave"),
    [("plain", socket.socket.close), ("plain", reset), ("tls", socket.socket.close), ("tls", reset), ("tls", goodbye)],
)
@pytest.mark.processes
def test_a_client_that_leaves_ends_its_batch(
    gateways: dict[str, Gateway],
    authority: Authority,
    multiplexer: FakeMultiplexer,
    language: str,
    leave: Callable[[socket.socket], None],
) -> None:
    client = connected(gateways[language], authority if language == "tls" else None)
    client.sendall(REQUEST)
    assert multiplexer.begun.wait(10)
    leave(client)
    assert multiplexer.ended.wait(NOTICED_SECS)


@pytest.mark.processes
def test_a_client_that_has_ended_its_side_gets_its_answer(
    gateways: dict[str, Gateway], multiplexer: FakeMultiplexer
) -> None:
    """Long after it was looked at, and nothing but its answer."""

    def late(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        time.sleep(1.0)
        context.abort(grpc.StatusCode.NOT_FOUND, "late")
        yield b""

    multiplexer.answers["EmbedArrowStream"] = late
    with connected(gateways["plain"], None) as client:
        client.sendall(REQUEST)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.endswith(b'{"error":"late","error_type":"NotFound"}')
