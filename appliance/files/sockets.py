"""Unix sockets of the data folder: connecting to them, whether a program listens, the user at the other end."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

CONNECT_SECS = 5.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


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


def answers(path: Path) -> bool:
    """Whether a program listens there. Raises: PermissionError where this user may not ask."""
    try:
        connected(path, CONNECT_SECS).close()
    except PermissionError:
        raise
    except OSError:
        return False
    return True


def peer(connection: socket.socket | None) -> str | None:
    """The user at the other end of a unix socket, by the kernel's account; None for any other connection."""
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    _, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return f"uid {uid}"
