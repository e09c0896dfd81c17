"""Idle connections to replicas, kept for the next call."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection

from appliance.core.routing import Replica
from appliance.drivers.http2 import Connection
from appliance.multiplexer.cooperation import WouldBlock

MOST_IDLE = 64  # idle connections to one replica


class UnprovedListener(OSError):
    """The process that listens on the replica's port is not the replica."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(f"what listens on {replica.address} is not this replica")


class ConnectionPool:
    """Connections by replica, each proved when it is made: any process may have the port. Thread-safe.

    connect(replica): a new connection, which may lead to another process. is_proved(replica, connection): whether it
    leads to the replica.
    """

    def __init__(
        self, connect: Callable[[Replica], Connection], is_proved: Callable[[Replica, Connection], bool]
    ) -> None:
        self.connect = connect
        self.is_proved = is_proved
        self.idle: defaultdict[Replica, list[Connection]] = defaultdict(list)
        self.busy: defaultdict[Replica, set[Connection]] = defaultdict(set)
        self.kept: Collection[Replica] | None = None  # of no others any connection is; None: of all
        self.lock = threading.Lock()

    def acquire(self, replica: Replica, may_wait: bool = True) -> Connection:
        """A living connection, an idle one if there is one. may_wait: while one is made.

        Raises: OSError when the replica does not listen; WouldBlock where one had to be made.
        """
        if idle := self.acquire_idle(replica):
            return idle
        if not may_wait:
            raise WouldBlock
        return self.mark_busy(replica, self.proved(replica))

    def acquire_idle(self, replica: Replica) -> Connection | None:
        """A living connection that need not be made, nor waited for; None where there is none."""
        while True:
            with self.lock:
                connection = self.idle[replica].pop() if self.idle[replica] else None
            if connection is None:
                return None
            if connection.fresh():
                return self.mark_busy(replica, connection)
            connection.close()

    def proved(self, replica: Replica) -> Connection:
        """A new connection to the replica. Raises: OSError."""
        connection = self.connect(replica)
        try:
            if not self.is_proved(replica, connection):
                raise UnprovedListener(replica)
        except OSError:
            connection.close()
            raise
        return connection

    def mark_busy(self, replica: Replica, connection: Connection) -> Connection:
        with self.lock:
            self.busy[replica].add(connection)
        return connection

    def release(self, replica: Replica, connection: Connection) -> None:
        """Keep the connection, if another call may be made on it."""
        with self.lock:
            self.busy[replica].discard(connection)
            if self.kept is not None and replica not in self.kept:
                if not self.busy[replica]:
                    del self.busy[replica]
            elif connection.idle and len(self.idle[replica]) < MOST_IDLE:
                self.idle[replica].append(connection)
                return
        connection.close()

    def drop_idle(self, replica: Replica) -> None:
        """Close the idle connections to a replica that has just died: they have ended with it, noticed or not."""
        with self.lock:
            gone = self.idle.pop(replica, [])
        for connection in gone:
            connection.close()

    def cut(self, replica: Replica) -> None:
        """End every call to a replica that shall answer no more, as if it had died."""
        self.drop_idle(replica)
        with self.lock:
            connections = list(self.busy[replica])
        for connection in connections:
            connection.cut()

    def keep_only(self, replicas: Collection[Replica]) -> None:
        """Close idle connections to all other replicas, and those of their calls when these end."""
        with self.lock:
            self.kept = replicas
            gone = [connection for replica in self.idle.keys() - replicas for connection in self.idle.pop(replica)]
            for replica in [replica for replica in self.busy.keys() - replicas if not self.busy[replica]]:
                del self.busy[replica]
        for connection in gone:
            connection.close()
