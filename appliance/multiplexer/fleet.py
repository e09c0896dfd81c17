"""The connections to all replicas of the table, kept in step with it by one thread."""

from __future__ import annotations

import itertools
import logging
import threading
import time

from appliance.core import routing
from appliance.core.routing import Replica, Target
from appliance.drivers.tei import Backend
from appliance.multiplexer.directory import Directory

log = logging.getLogger(__name__)
TICK_SECS = 0.1
WAKE_TICKS = 3  # an unconnected channel is asked to connect every third tick


class Fleet:
    """Backends by replica. `pick` may be called from any thread; only the keeper thread changes the fleet."""

    def __init__(self, directory: Directory, retire_secs: float) -> None:
        self.directory = directory
        self.retire_secs = retire_secs
        self.backends: dict[Replica, Backend] = {}
        self.retired: list[tuple[float, Backend]] = []
        self.turns = itertools.count()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="fleet", daemon=True)

    def start(self) -> None:
        self.follow()
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def pick(self, target: Target) -> Backend:
        """The backend that shall answer. Raises: Problem as `routing.candidates` and `routing.pick`."""
        backends = self.backends
        replicas = routing.candidates(self.directory.table, target)
        known = [replica for replica in replicas if replica in backends]
        chosen = routing.pick(
            known or replicas,
            ready=lambda replica: replica in backends and backends[replica].ready,
            load=lambda replica: backends[replica].outstanding,
            turn=next(self.turns),
        )
        return backends[chosen]

    def keep(self) -> None:
        for tick in itertools.count():
            if self.ended.wait(TICK_SECS):
                return
            try:
                self.follow()
                if tick % WAKE_TICKS == 0:
                    self.wake()
                self.close_retired()
            except Exception:
                log.exception("Keeping the fleet in step failed; trying again")

    def follow(self) -> None:
        """Connect to new replicas, retire those that are gone."""
        if not self.directory.refresh() and self.backends:
            return
        routes = self.directory.table.routes
        wanted = {replica for route in routes if route.wanted == "running" for replica in route.replicas}
        before = self.backends
        self.backends = {replica: before.get(replica) or Backend(replica) for replica in wanted}
        gone = time.monotonic()
        self.retired += [(gone, backend) for replica, backend in before.items() if replica not in wanted]

    def wake(self) -> None:
        for backend in self.backends.values():
            backend.wake()

    def close_retired(self) -> None:
        """Close what left the table once its calls have ended: a replica drains before it stops."""
        patience = time.monotonic() - self.retire_secs
        for entry in list(self.retired):
            retired_at, backend = entry
            if backend.outstanding == 0 or retired_at < patience:
                backend.close()
                self.retired.remove(entry)
