"""Sockets. Those of the data folder: connecting to them, whether a program listens, the user at the other end. Those to
other machines: how their loss is noticed."""

from __future__ import annotations

import errno
import resource
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

CONNECT_SECS = 5.0
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# A machine that is gone, or cut off, says nothing: its kernel is asked, and silent for this long it counts as gone.
SILENT_SECS, ASK_SECS, ASKED = 2, 1, 2
BYTES_ACKED = struct.Struct("@120xQ")  # of Linux' tcp_info: what the peer's kernel has taken, since 4.1
UNACKNOWLEDGED_MS = (SILENT_SECS + ASK_SECS * ASKED) * 1000


class HasOptions(Protocol):
    """A socket, or one with TLS around it."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def most_descriptors() -> int:
    """How many descriptors this process may have open: from now on as many as it may ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # what we have must do
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


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


def listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to all addresses of the host; others may be bound there, too, and take their share.

    They are of IPv6, also those of IPv4 addresses, where the kernel has both: then a socket of IPv4 that Envoy opens
    beside them has the connections to itself. Raises: OSError when the port is taken; then none is left open.
    """
    found: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            dual = socket.has_dualstack_ipv6()
            if family == socket.AF_INET and dual:
                family, where = socket.AF_INET6, ("::" if where[0] == "0.0.0.0" else f"::ffff:{where[0]}", port)
            each = socket.socket(family, kind, protocol)
            found.append(each)
            if family == socket.AF_INET6 and dual:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                each.bind(where)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                missing = error  # a name may have addresses that this machine has not
                found.pop().close()
    except OSError:
        for each in found:
            each.close()
        raise
    if missing and not found:
        raise missing
    return found


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


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection whose peer's kernel does not answer for a minute. One that answers may let what
    we send wait as long as it likes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def bytes_acked(connection: HasOptions) -> int:
    """How much the peer's kernel has acknowledged; 0 where ours does not count it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.size)
    except OSError:
        return 0
    return int(BYTES_ACKED.unpack(info)[0]) if len(info) == BYTES_ACKED.size else 0
