"""A unix socket is connected within its time, or nothing of it is left open."""

import socket
from pathlib import Path

import pytest

from appliance.files.sockets import connected


def test_a_listener_is_reached_and_the_time_limit_is_set(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a.sock"))
        listener.listen()
        with connected(tmp_path / "a.sock", 3.0) as connection:
            assert connection.gettimeout() == 3.0
            listener.accept()[0].close()
            assert connection.recv(1) == b""


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_where_no_program_listens_an_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connected(tmp_path / "none.sock", 1.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "left.sock"))
    with pytest.raises(ConnectionRefusedError):
        connected(tmp_path / "left.sock", 1.0)
