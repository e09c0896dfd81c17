"""What is taken of a request before it has a thread."""

import io
import socket
import struct
from collections.abc import Iterator

import pytest

from appliance.files.requestbuffer import AHEAD_BYTES, take_request

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client, and the server's end, which does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        server.setblocking(False)
        yield client, server


def send(client: socket.socket, server: socket.socket, data: bytes) -> None:
    """Until the kernel has it at the other end."""
    client.sendall(data)
    server.setblocking(True)
    server.recv(1, socket.MSG_PEEK)
    server.setblocking(False)


def test_a_request_is_there_with_its_last_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    buffer = io.BytesIO()
    assert not take_request(server, buffer)
    for byte in REQUEST[:-1]:
        send(client, server, bytes([byte]))
        assert not take_request(server, buffer)
    send(client, server, REQUEST[-1:])
    assert take_request(server, buffer)
    assert buffer.getvalue() == REQUEST


def test_what_came_with_the_last_one_may_be_all(pair: tuple[socket.socket, socket.socket]) -> None:
    _, server = pair
    buffer = io.BytesIO(REQUEST + REQUEST[:3])
    assert take_request(server, buffer)
    assert buffer.getvalue() == REQUEST + REQUEST[:3]


def test_a_large_one_need_not_be_there(pair: tuple[socket.socket, socket.socket]) -> None:
    """It may be refused for its size."""
    client, server = pair
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % AHEAD_BYTES
    send(client, server, head)
    buffer = io.BytesIO()
    assert take_request(server, buffer)
    assert buffer.getvalue() == head


def test_a_large_head_need_not_be_there(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    head = b"GET / HTTP/1.1\r\nX: "
    buffer = io.BytesIO()
    send(client, server, head + b"a" * (AHEAD_BYTES - len(head) - 1))
    while len(buffer.getvalue()) < AHEAD_BYTES - 1:
        assert not take_request(server, buffer)
    send(client, server, b"b")
    assert take_request(server, buffer)
    assert buffer.getvalue().endswith(b"aab")


@pytest.mark.parametrize("lingers", [True, False], ids=["ended", "reset"])
def test_a_client_that_is_gone_sends_no_more(pair: tuple[socket.socket, socket.socket], lingers: bool) -> None:
    client, server = pair
    buffer = io.BytesIO()
    send(client, server, REQUEST[:3])
    assert not take_request(server, buffer)
    if not lingers:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert take_request(server, buffer)
    assert buffer.getvalue() == REQUEST[:3]
