"""Sockets. Those of the data folder: connecting to them, whether a program listens, the user at the other end. Those to
other machines: how their loss is noticed."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

CONNECT_SECS = 5.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# A machine that is gone, or cut off, says nothing: its kernel is asked, and silent for this long it counts as gone.
SILENT_SECS, ASK_SECS, ASKED = 2, 1, 2
UNACKNOWLEDGED_MS = (SILENT_SECS + ASK_SECS * ASKED) * 1000


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


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 address comes in brackets, and goes without."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def notice_loss(connection: socket.socket) -> None:
    """Have the kernel end a connection whose peer's kernel does not answer, within some four seconds. What a peer on
    this machine does is known without."""
    if is_loopback(connection.getpeername()[0]):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENT_SECS),
        (socket.TCP_KEEPINTVL, ASK_SECS),
        (socket.TCP_KEEPCNT, ASKED),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
