"""Who listens on a loopback port: the process that supervisord started for a replica, or somebody else.

A port that answers proves nothing: another program may have taken it while its owner was away. The kernel knows better:
/proc/net/tcp names the socket that listens, /proc/PID/fd the processes that have it open, and /proc/PID/environ the
marker that supervisord gave to them, which a program and all of its children bear as long as they live. No message
travels, so it holds for TEI and for the embedded engine alike, and nobody can be asked for it in vain.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

LISTENING = "0A"
LOOPBACK = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"  # as /proc/net/tcp writes it
MAPPED = f"{0:016X}{int.from_bytes(bytes(2) + bytes([255, 255]), sys.byteorder):08X}{LOOPBACK}"  # ::ffff:127.0.0.1
REACHED = ("127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::")  # where a listener gets what is sent to loopback
STRANGER_SECS = 1.0  # a socket never changes hands; looking through all processes once a second is enough
MOST_REMEMBERED = 4096


@dataclass(frozen=True)
class Owner:
    """pid and command are None where the kernel does not tell: it is another user's process."""

    pid: int | None
    command: str | None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"


class Listeners:
    """variable: the name of the marker in the environment of a replica's processes. Thread-safe."""

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self.proofs: dict[tuple[str, str], float] = {}  # (socket, marker) -> until when the answer below holds
        self.strangers: dict[tuple[str, str], float] = {}

    def proved(self, port: int, marker: str) -> bool:
        """Whether what listens on 127.0.0.1:port is a process with this marker, and nothing else listens there.

        Some 50 microseconds for a socket that was proved before, some milliseconds for a new one.
        """
        try:
            found = sockets(port)
            return bool(found) and all(self.belongs(each, marker) for each in found)
        except OSError:  # no file descriptor is left: then nothing is proved
            return False

    def belongs(self, inode: str, marker: str) -> bool:
        key, now = (inode, marker), time.monotonic()
        if key in self.proofs:
            return True
        if self.strangers.get(key, 0.0) > now:
            return False
        for known in (self.proofs, self.strangers):
            if len(known) >= MOST_REMEMBERED:
                known.clear()
        if any(holds(pid, inode) for pid in marked(self.variable, marker)):
            self.proofs[key] = now
            return True
        self.strangers[key] = now + STRANGER_SECS
        return False

    def stranger(self, port: int, prefix: str) -> Owner | None:
        """Who listens on the port and bears no marker that begins with ``prefix``; None when nobody does.

        Also who listens on all addresses: nobody else can then listen on loopback. Some 50 ms where somebody is found.
        """
        try:
            found = psutil.net_connections("tcp") if sockets(port) or wildcards(port) else []
        except OSError:  # no file descriptor is left: nobody can be named
            return None
        for connection in found:
            if connection.status == psutil.CONN_LISTEN and connection.laddr in [(ip, port) for ip in REACHED]:
                pid = connection.pid
                if pid is None or not (marker_of(pid, self.variable) or "").startswith(prefix):
                    return Owner(pid, command(pid) if pid else None)
        return None


def sockets(port: int) -> list[str]:
    """The inodes of the sockets that listen on exactly 127.0.0.1:port. grpc's own are IPv6 and listen on IPv4, too."""
    return listening("/proc/net/tcp", f"{LOOPBACK}:{port:04X}") + listening("/proc/net/tcp6", f"{MAPPED}:{port:04X}")


def wildcards(port: int) -> list[str]:
    """Those that listen on the port of all addresses."""
    return listening("/proc/net/tcp", f"{0:08X}:{port:04X}") + listening("/proc/net/tcp6", f"{0:032X}:{port:04X}")


def listening(table: str, address: str) -> list[str]:
    """The kernel lists the sockets that listen before all others, so some thousand connections are not read."""
    found = []
    try:
        with open(table, encoding="ascii") as rows:
            next(rows, "")  # the heading
            for row in rows:
                columns = row.split(None, 10)
                if columns[3] != LISTENING:
                    break
                if columns[1] == address:
                    found.append(columns[9])
    except FileNotFoundError:
        pass  # a kernel without IPv6
    return found


def marked(variable: str, marker: str) -> Iterator[int]:
    """The processes with exactly this marker in their environment."""
    for name in os.listdir("/proc"):
        if name.isdigit() and marker_of(int(name), variable) == marker:
            yield int(name)


def marker_of(pid: int, variable: str) -> str | None:
    """What a process has as ``variable``; None when it has not, is gone, or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = b"\0" + file.read()
    except OSError:
        return None
    _, found, rest = environ.partition(f"\0{variable}=".encode())
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else None


def holds(pid: int, inode: str) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(link(entry.path) == wanted for entry in entries)
    except OSError:
        return False  # it has just ended


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def command(pid: int) -> str | None:
    """On one line, whatever its arguments hold."""
    try:
        line = " ".join(" ".join(psutil.Process(pid).cmdline()).split())
        return line[:200] or psutil.Process(pid).name()
    except psutil.Error:
        return None
