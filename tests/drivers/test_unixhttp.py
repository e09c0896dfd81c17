"""HTTP through a unix socket: the host of the URL does not matter, and the kernel names the user at the other end."""

import os
import socket
import threading
from pathlib import Path

import pytest
import requests

from appliance.drivers.unixhttp import UnixSocketAdapter
from appliance.files.sockets import answers, peer

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def test_a_request_goes_through_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    users: list[str | None] = []
    assert not answers(path)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            users.append(peer(connection))
            connection.recv(65536)
            connection.sendall(REPLY)

    with socket.socket(socket.AF_UNIX) as listener, requests.Session() as session:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        session.mount("http://", UnixSocketAdapter(path))
        assert session.get("http://example.invalid/x", timeout=10).text == "ok"
        thread.join()
        assert answers(path)
    assert users == [f"uid {os.getuid()}"]


def test_without_a_listener_the_connection_fails(tmp_path: Path) -> None:
    with requests.Session() as session:
        session.mount("http://", UnixSocketAdapter(tmp_path / "none.sock"))
        with pytest.raises(requests.ConnectionError):
            session.get("http://localhost/", timeout=10)


def test_only_unix_sockets_have_a_known_user() -> None:
    assert peer(None) is None
    with socket.socket() as tcp:
        assert peer(tcp) is None
