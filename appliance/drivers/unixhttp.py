"""HTTP through a unix socket of the data folder, for clients that use `requests`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection
from urllib3.exceptions import NewConnectionError

from appliance.files.sockets import CONNECT_SECS, connected


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
