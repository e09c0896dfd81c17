"""The metrics pages of replicas. They are near, and ours: nothing of what a library for the web does is needed.

The standard library's client takes twice the CPU for a page of 33 KB (Python 3.11): it looks up the address, reads the
head as that of an e-mail, and waits in one system call and reads in the next.
"""

from __future__ import annotations

import math
import re
import socket
import struct
import sys
import time
from collections.abc import Sequence

from appliance.core.program import LOOPBACK

LEAST_SECS = 0.001  # 0 would mean to wait for ever
READ_BYTES = 2**16
AT_ONCE = 128  # pages, each with a file descriptor
HEAD = f"HTTP/1.1\r\nHost: {LOOPBACK}\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
OK = re.compile(rb"HTTP/1\.[01] 200\b")
END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)


def metrics_page(port: int, timeout_secs: float, path: str = "/metrics", host: str = LOOPBACK) -> str | None:
    """The text of ``path``; None when it does not come. timeout_secs: of connecting, and of each read. host: an IP
    address."""
    return metrics_pages([port], timeout_secs, path, host)[0]


def metrics_pages(
    ports: Sequence[int], timeout_secs: float, path: str = "/metrics", host: str = LOOPBACK
) -> list[str | None]:
    """The page of each port, as `metrics_page`. Those that hang cost ``timeout_secs`` together, of AT_ONCE each. With
    16 threads 100 pages took three times as long."""
    return AskedPages(ports, timeout_secs, path, host).read()


class AskedPages:
    """The pages of many ports. AT_ONCE are asked before the first is read, so they are written at the same time."""

    def __init__(self, ports: Sequence[int], timeout_secs: float, path: str = "/metrics", host: str = LOOPBACK) -> None:
        self.ports = list(ports)  # that were not asked yet
        self.timeout_secs = timeout_secs
        self.path = path
        self.host = host
        self.ask()

    def ask(self) -> None:
        some, self.ports = self.ports[:AT_ONCE], self.ports[AT_ONCE:]
        self.connections = [ask(self.host, port, self.timeout_secs, self.path) for port in some]

    def read(self) -> list[str | None]:
        """All of them, once. Whoever asked may have had other work meanwhile, so their time counts from here."""
        pages: list[str | None] = []
        while self.connections:
            until = time.monotonic() + self.timeout_secs
            pages += [read(connection, until) for connection in self.connections]
            self.ask()
        return pages

    def close(self) -> None:
        """Of pages that nobody reads."""
        for connection in self.connections:
            if connection:
                connection.close()


def ask(host: str, port: int, timeout_secs: float, path: str) -> socket.socket | None:
    """A connection on which the page was asked for; None where nothing listens."""
    try:
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:  # no free file descriptor
        return None
    try:
        limit(connection, socket.SO_SNDTIMEO, timeout_secs)  # also of connecting
        connection.connect((host, port))
        connection.sendall(f"GET {path} {HEAD}".encode())
    except OSError:
        connection.close()
        return None
    return connection


def limit(connection: socket.socket, direction: int, secs: float) -> None:
    """For how long the kernel waits in a call: one system call waits and reads. Then BlockingIOError is raised."""
    microseconds = math.ceil(max(LEAST_SECS, secs) * 1e6)
    connection.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", *divmod(microseconds, 10**6)))


def read(connection: socket.socket | None, until: float) -> str | None:
    if connection is None:
        return None
    try:
        return received(connection, until).decode(errors="replace")
    except (OSError, ValueError):
        return None
    finally:
        connection.close()


def received(connection: socket.socket, until: float) -> bytes:
    """The body of a reply. Raises: OSError when it does not come in time, ValueError when it is no whole page."""
    reply, head_size, size = bytearray(), 0, sys.maxsize
    while len(reply) < size:
        limit(connection, socket.SO_RCVTIMEO, until - time.monotonic())
        part = connection.recv(READ_BYTES)
        if not part:  # the end of a page without a length
            break
        reply += part
        if not head_size and (end := reply.find(END_OF_HEAD)) >= 0:
            head_size = end + len(END_OF_HEAD)
            length = LENGTH.search(reply, 0, head_size)
            size = head_size + int(length[1]) if length else sys.maxsize
    if not OK.match(reply) or not head_size or len(reply) < size < sys.maxsize:
        raise ValueError("it is no whole page")
    body = bytes(reply[head_size:size])
    return unchunked(body) if CHUNKED.search(reply, 0, head_size) else body


def unchunked(body: bytes) -> bytes:
    """A body that came in chunks. Raises: ValueError when it is not whole."""
    chunks: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if not size:
            return b"".join(chunks)
        at = end + 2
        if body[at + size : at + size + 2] != b"\r\n":
            raise ValueError("a chunk is not whole")
        chunks.append(body[at : at + size])
        at += size + 2
