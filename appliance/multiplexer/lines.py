"""Idle connections to replicas, kept for the next call."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection

from appliance.drivers.http2 import Connection

KEPT = 64  # idle connections to one replica


class Lines:
    """Connections by address. Thread-safe."""

    def __init__(self) -> None:
        self.idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self.busy: defaultdict[str, set[Connection]] = defaultdict(set)
        self.lock = threading.Lock()

    def take(self, address: str) -> Connection:
        """A living connection, an idle one if there is one. Raises: OSError when nobody listens."""
        while True:
            with self.lock:
                kept = self.idle[address].pop() if self.idle[address] else None
            if kept is None:
                return self.taken(Connection(address))
            if kept.fresh():
                return self.taken(kept)
            kept.close()

    def taken(self, line: Connection) -> Connection:
        with self.lock:
            self.busy[line.address].add(line)
        return line

    def give(self, line: Connection) -> None:
        """Keep the connection, if another call may be made on it."""
        with self.lock:
            self.busy[line.address].discard(line)
            if line.idle and len(self.idle[line.address]) < KEPT:
                self.idle[line.address].append(line)
                return
        line.close()

    def drop(self, address: str) -> None:
        """Forget the idle connections to a replica that has just died: theirs have ended too, seen or not."""
        with self.lock:
            gone = self.idle.pop(address, [])
        for line in gone:
            line.close()

    def cut(self, address: str) -> None:
        """End every call to a replica that shall answer no more, as if it had died."""
        self.drop(address)
        with self.lock:
            lines = list(self.busy[address])
        for line in lines:
            line.cut()

    def keep_only(self, addresses: Collection[str]) -> None:
        """Close what nobody will ask for again."""
        with self.lock:
            gone = [line for address in self.idle.keys() - addresses for line in self.idle.pop(address)]
        for line in gone:
            line.close()
