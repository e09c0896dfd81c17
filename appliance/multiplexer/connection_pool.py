"""Idle connections to replicas, kept for the next call."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection

from appliance.core.routing import Replica
from appliance.drivers.http2 import Connection

KEPT = 64  # idle connections to one replica


class Unproved(OSError):
    """Somebody listens on the replica's port who is not the replica."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(f"what listens on {replica.address} is not this replica")


class ConnectionPool:
    """Connections by replica, each proved when it is made: a port may be anybody's. Thread-safe."""

    def __init__(self, proved: Callable[[Replica], bool]) -> None:
        self.proved = proved
        self.idle: defaultdict[Replica, list[Connection]] = defaultdict(list)
        self.busy: defaultdict[Replica, set[Connection]] = defaultdict(set)
        self.lock = threading.Lock()

    def take(self, replica: Replica) -> Connection:
        """A living connection, an idle one if there is one. Raises: OSError when the replica does not listen."""
        while True:
            with self.lock:
                kept = self.idle[replica].pop() if self.idle[replica] else None
            if kept is None:
                return self.taken(replica, self.connected(replica))
            if kept.fresh():
                return self.taken(replica, kept)
            kept.close()

    def connected(self, replica: Replica) -> Connection:
        line = Connection(replica.address)
        if not self.proved(replica):
            line.close()
            raise Unproved(replica)
        return line

    def taken(self, replica: Replica, line: Connection) -> Connection:
        with self.lock:
            self.busy[replica].add(line)
        return line

    def give(self, replica: Replica, line: Connection) -> None:
        """Keep the connection, if another call may be made on it."""
        with self.lock:
            self.busy[replica].discard(line)
            if line.idle and len(self.idle[replica]) < KEPT:
                self.idle[replica].append(line)
                return
        line.close()

    def drop(self, replica: Replica) -> None:
        """Forget the idle connections to a replica that has just died: theirs have ended too, seen or not."""
        with self.lock:
            gone = self.idle.pop(replica, [])
        for line in gone:
            line.close()

    def cut(self, replica: Replica) -> None:
        """End every call to a replica that shall answer no more, as if it had died."""
        self.drop(replica)
        with self.lock:
            lines = list(self.busy[replica])
        for line in lines:
            line.cut()

    def keep_only(self, replicas: Collection[Replica]) -> None:
        """Close what nobody will ask for again."""
        with self.lock:
            gone = [line for replica in self.idle.keys() - replicas for line in self.idle.pop(replica)]
            for replica in [replica for replica in self.busy.keys() - replicas if not self.busy[replica]]:
                del self.busy[replica]
        for line in gone:
            line.close()
