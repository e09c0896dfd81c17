"""HTTP through a unix socket of the data folder: whether a program listens, an adapter for clients, the peer's user."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection
from urllib3.exceptions import NewConnectionError

from appliance.files.sockets import connected

CONNECT_SECS = 5.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


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


class UnixSocketAdapter(HTTPAdapter):
    """For a session of `requests`: each request goes through the socket at ``path``, whatever host its URL names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()

    def init_poolmanager(self, *positional: Any, **named: Any) -> None:
        super().init_poolmanager(*positional, **named)
        connection = type("Connection", (UnixConnection,), {"path": str(self.path)})
        pool = type("Pool", (HTTPConnectionPool,), {"ConnectionCls": connection})
        self.poolmanager.pool_classes_by_scheme = {"http": pool}


class UnixConnection(HTTPConnection):
    """path: of the socket; the host is ignored."""

    path: str

    def _new_conn(self) -> socket.socket:
        try:
            return connected(self.path, CONNECT_SECS)
        except OSError as error:
            raise NewConnectionError(self, f"{self.path}: {error}") from error
