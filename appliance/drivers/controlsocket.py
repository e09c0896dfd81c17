"""Requests of our own processes to control, through its socket in the data folder."""

from __future__ import annotations

import http.client
import json
import socket
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from appliance.core.problems import Kind, Problem
from appliance.files.sockets import connected

CONNECT_SECS = 5.0
LONGEST_ANSWER = 1024 * 1024
WAITING_SINCE = "X-Waiting-Since"  # when the first call came for which an instance is woken; of time.monotonic


class SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_secs: float) -> None:
        super().__init__("control", timeout=timeout_secs)
        self.path, self.timeout_secs = path, timeout_secs

    def connect(self) -> None:
        self.sock: socket.socket = connected(self.path, CONNECT_SECS)
        self.sock.settimeout(self.timeout_secs)


def wake(path: Path, instance: str, since: float, timeout_secs: float) -> None:
    """Ask control to wake an instance; it answers as soon as that is begun. path: of its socket; since: see
    WAITING_SINCE.

    Raises: Problem as control gave it; unavailable where control does not answer.
    """
    connection = SocketConnection(path, timeout_secs)
    try:
        connection.request("POST", f"/instances/{quote(instance, safe='')}/wake", headers={WAITING_SINCE: repr(since)})
        response = connection.getresponse()
        body = response.read(LONGEST_ANSWER)
    except (OSError, http.client.HTTPException) as error:
        raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", f"Control does not answer on {path}: {error}") from error
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise refusal(response.status, body)


def refusal(status: int, body: bytes) -> Problem:
    kind = Kind.UNAVAILABLE if status >= HTTPStatus.INTERNAL_SERVER_ERROR else Kind.PRECONDITION
    try:
        told = json.loads(body)
        return Problem(kind, str(told["code"]), str(told["error"]))
    except (ValueError, KeyError, TypeError):
        return Problem(kind, "BACKEND_UNAVAILABLE", f"Control answered with status {status}")
