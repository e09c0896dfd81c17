"""Which process listens on a loopback port: the one that supervisord started for a replica, or another one.

A port that answers proves nothing: another program may have bound it while its owner was restarting. The kernel has the
proof: its table of sockets names the one that listens (`wire.inet_diag`, else /proc/net/tcp), /proc/PID/fd the
processes that have it open, and /proc/PID/environ the marker that supervisord gave to them, which a program and its
children keep for as long as they live. They are sent no message, so this works for TEI and for the embedded engine, and
for a process that hangs.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import psutil

from appliance.files.procfs import FLAGS, status_fields, variable_of
from appliance.wire import inet_diag
from appliance.wire.inet_diag import Listener

SOCK_DIAG = 4  # netlink's number for it, which Python's `socket` does not name
READ_BYTES = 2**16  # the kernel sends 2**15 at most
ANSWER_SECS = 1.0  # of a kernel, which answers at once
NO_FILE = (errno.EMFILE, errno.ENFILE)
LISTENING = "0A"  # in /proc/net/tcp
LOOPBACK = socket.inet_aton("127.0.0.1")
MAPPED = socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
ANY, ANY_V6 = bytes(4), bytes(16)
REACHED = ("127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::")  # a listener on one of these is reached through loopback
EXITING = 0x4  # PF_EXITING, among the flags of /proc/PID/stat
STRANGER_SECS = 1.0  # a socket keeps its owner, so all processes are searched for it at most once a second
MOST_REMEMBERED = 4096


@dataclass(frozen=True)
class Owner:
    """The process behind a listener. pid and command are None when the kernel hides them: it is another user's."""

    pid: int | None
    command: str | None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"


class Listeners:
    """Proves who listens, and remembers it. variable: the marker in the environment of replicas. Thread-safe."""

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self.owned: dict[tuple[int, str], int] = {}  # (socket, marker) -> process
        self.strangers: dict[tuple[int, str], float] = {}  # (socket, marker) -> when the next search may be made

    def proved(self, port: int, marker: str, table: ListenerTable | None = None) -> bool:
        """Whether processes with this marker listen on 127.0.0.1:port, and no others. table: of a moment ago; left out,
        the kernel is asked now, about this port.

        Some 50 microseconds where it is asked; some milliseconds for a socket that was not proved before.
        """
        try:
            inodes = (table or listening(port)).on_loopback(port)
            return bool(inodes) and all(self.belongs(inode, marker) for inode in inodes)
        except OSError:  # without a free file descriptor there is no proof
            return False

    def owner(self, port: int, marker: str, table: ListenerTable) -> int | None:
        """The process with this marker that listens there; None where `proved` is False."""
        if not self.proved(port, marker, table):
            return None
        return next((self.owned.get((inode, marker)) for inode in table.on_loopback(port)), None)

    def belongs(self, inode: int, marker: str) -> bool:
        key, now = (inode, marker), time.monotonic()
        if key in self.owned:
            return True
        if self.strangers.get(key, 0.0) > now:
            return False
        if len(self.owned) >= MOST_REMEMBERED:
            self.owned.clear()
        if len(self.strangers) >= MOST_REMEMBERED:
            self.strangers.clear()
        if pid := next((pid for pid in marked(self.variable, marker) if holds(pid, inode)), None):
            self.owned[key] = pid
            return True
        self.strangers[key] = now + STRANGER_SECS
        return False

    def stranger(self, port: int, prefix: str, table: ListenerTable | None = None) -> Owner | None:
        """A process that listens on the port without a marker that begins with ``prefix``; None when there is none.
        table: as for `proved`.

        A listener on all addresses counts, since no other process can then listen on loopback. One that is ending does
        not: the port is free in a moment, and it may be ours. Takes some 50 ms when there is a listener.
        """
        try:
            table = table or listening(port)
            found = table.on_loopback(port) or table.on_all(port)
            connections = psutil.net_connections("tcp") if found else []
        except OSError:  # without a free file descriptor no process can be named
            return None
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and connection.laddr in [(ip, port) for ip in REACHED]:
                pid = connection.pid
                if pid is None:
                    return Owner(None, None)
                if not (marker_of(pid, self.variable) or "").startswith(prefix) and not is_ending(pid):
                    return Owner(pid, command(pid))
        return None


class ListenerTable:
    """The sockets of this machine that listen, as inodes by their address and port."""

    def __init__(self, inodes: Mapping[tuple[bytes, int], list[int]]) -> None:
        self.inodes = inodes

    def on_loopback(self, port: int) -> list[int]:
        """Those that listen on exactly 127.0.0.1:port; grpc's are IPv6 sockets for both families."""
        return self.of(LOOPBACK, port) + self.of(MAPPED, port)

    def on_all(self, port: int) -> list[int]:
        """Those that listen on the port of all addresses."""
        return self.of(ANY, port) + self.of(ANY_V6, port)

    def of(self, address: bytes, port: int) -> list[int]:
        return self.inodes.get((address, port), [])


def listening(on_port: int = 0) -> ListenerTable:
    """Who listens at this moment. on_port: there, and others may be left out; 0: on any, which takes 0.3 ms for 200.
    Raises: OSError without a free file descriptor."""
    inodes = defaultdict[tuple[bytes, int], list[int]](list)
    for address, port, inode in told_over_netlink(on_port) if tells_over_netlink() else read_from_proc():
        inodes[address, port].append(inode)
    return ListenerTable(dict(inodes))


@cache
def tells_over_netlink() -> bool:
    """Whether the kernel does: one may be built without, and a sandbox may forbid it. Asked once, since each try may
    make the kernel look for a module. Raises: as `listening`."""
    try:
        list(told_over_netlink())
    except OSError as error:
        if error.errno in NO_FILE:
            raise
        return False
    return True


def told_over_netlink(port: int = 0) -> Iterator[Listener]:
    """port: of all that listen there; 0: anywhere. Raises: OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_SECS)
        for family in inet_diag.ADDRESS_BYTES:
            kernel.send(inet_diag.request(family, port))
            yield from inet_diag.listeners(iter(lambda: kernel.recv(READ_BYTES), b""))


def read_from_proc() -> Iterator[Listener]:
    """It lists listening sockets before all others, so the rows of some thousand connections are not read."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as rows:
                next(rows, "")  # the heading
                for row in rows:
                    columns = row.split(None, 10)
                    if columns[3] != LISTENING:
                        break
                    address, _, port = columns[1].partition(":")
                    yield Listener(bytes_of(address), int(port, 16), int(columns[9]))
        except FileNotFoundError:
            pass  # a kernel without IPv6


def bytes_of(address: str) -> bytes:
    """An address of /proc/net/tcp, which writes words of 32 bits as this machine has them."""
    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    return struct.pack(f"={len(words)}I", *words)


def marked(variable: str, marker: str) -> Iterator[int]:
    """The processes with exactly this marker in their environment."""
    for name in os.listdir("/proc"):
        if name.isdigit() and marker_of(int(name), variable) == marker:
            yield int(name)


def marker_of(pid: int, variable: str) -> str | None:
    """As `variable_of`; None also when the process has ended or is another user's."""
    try:
        return variable_of(pid, variable)
    except OSError:
        return None


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or does: then it has lost its environment, and keeps its sockets until its memory is
    given back."""
    try:
        flags = status_fields(pid)[FLAGS]
    except OSError:
        return True
    return bool(int(flags) & EXITING)


def holds(pid: int, inode: int) -> bool:
    """Whether a process has a socket open."""
    target = f"socket:[{inode}]"
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(link(entry.path) == target for entry in entries)
    except OSError:
        return False  # it has just ended


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def command(pid: int) -> str | None:
    """The command line of a process as one line, whatever its arguments contain."""
    try:
        line = " ".join(" ".join(psutil.Process(pid).cmdline()).split())
        return line[:200] or psutil.Process(pid).name()
    except psutil.Error:
        return None
