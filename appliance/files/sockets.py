"""Unix sockets of the data folder, as their clients connect to them."""

from __future__ import annotations

import socket
from pathlib import Path


def connected(path: str | Path, timeout_secs: float) -> socket.socket:
    """A socket that is connected to the listener at ``path``. timeout_secs: of each operation on it.

    Raises: OSError; then no socket is left open.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_secs)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
