"""The connections to all replicas of the table, and the gate of each instance, kept in step with it by one thread."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from appliance.core import routing
from appliance.core.problems import Problem
from appliance.core.routing import Replica, Table, Target
from appliance.core.settings import QueueSettings
from appliance.directory import Directory
from appliance.drivers.http2 import UNAVAILABLE, CallFailed, Connection
from appliance.drivers.metrics import Meters
from appliance.drivers.tei import Backend
from appliance.multiplexer.gate import Gate
from appliance.multiplexer.lines import Lines

log = logging.getLogger(__name__)
TICK_SECS = 0.1
COUNT_TICKS = 10  # how often the queues are counted
WAKE_TICKS = 3  # an unconnected channel is asked to connect every third tick


class Fleet:
    """Backends by replica. Looked at from any thread; changed by the keeper thread alone.

    workers: multiplexer processes on this machine, which share the capacity of every replica.
    """

    def __init__(
        self, directory: Directory, meters: Meters, queue: QueueSettings, workers: int, retire_secs: float
    ) -> None:
        self.directory = directory
        self.meters = meters
        self.queue = queue
        self.workers = workers
        self.retire_secs = retire_secs
        self.backends: dict[Replica, Backend] = {}
        self.followed: Table | None = None
        self.gates: dict[str, Gate] = {}
        self.retired: list[tuple[float, Backend]] = []
        self.lines = Lines()
        self.turns = itertools.count()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="fleet", daemon=True)

    def start(self) -> None:
        self.follow()
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def ready(self, target: Target) -> list[Backend]:
        """The connected backends of a target. Raises: Problem as `routing.candidates`, or unavailable for none."""
        backends, table = self.backends, self.directory.table
        try:
            replicas = routing.candidates(table, target)
        except Problem:
            self.directory.refresh()  # what was created a moment ago is there, if not ready yet
            if self.directory.table is table:
                raise
            replicas = routing.candidates(self.directory.table, target)
        able = [backends[replica] for replica in replicas if replica in backends and backends[replica].ready]
        if not able:
            raise routing.none_ready(replicas)
        return able

    def pick(self, target: Target, without: Collection[Backend] = ()) -> Backend:
        """The least busy ready backend that is not one of ``without``. Raises: Problem as `ready`."""
        able = {backend.replica: backend for backend in self.ready(target)}
        chosen = routing.pick(
            list(able),
            ready=lambda replica: able[replica] not in without,
            load=lambda replica: able[replica].outstanding,
            turn=next(self.turns),
        )
        return able[chosen]

    def has_others(self, target: Target, gone: Backend) -> bool:
        """Whether a target has replicas besides ``gone``, connected or not."""
        try:
            return any(replica != gone.replica for replica in routing.candidates(self.directory.table, target))
        except Problem:
            return False

    def gate(self, backend: Backend) -> Gate:
        """The gate of the backend's instance."""
        return self.gates.setdefault(backend.replica.instance, Gate(backend.replica.instance, self.queue))

    @contextmanager
    def line(self, backend: Backend) -> Iterator[Connection]:
        """A connection to the backend for one call. Raises: CallFailed when nobody listens."""
        try:
            line = self.lines.take(backend.replica.address)
        except OSError as error:
            raise CallFailed(UNAVAILABLE, f"{error.strerror or error}", [], answered=False, begun=False) from error
        try:
            yield line
        finally:
            self.lines.give(line)

    def keep(self) -> None:
        for tick in itertools.count():
            if self.ended.wait(TICK_SECS):
                return
            try:
                self.follow()
                self.measure()
                if tick % COUNT_TICKS == 0:
                    self.count_waiting()
                if tick % WAKE_TICKS == 0:
                    for backend in self.backends.values():
                        backend.wake()
                self.close_retired()
            except Exception:
                log.exception("Keeping the fleet in step failed; trying again")

    def follow(self) -> None:
        """Connect to new replicas, retire those that are gone."""
        self.directory.refresh()
        table = self.directory.table
        if table is self.followed:
            return
        self.followed = table
        routes = table.routes
        wanted = {replica for route in routes if route.wanted == "running" for replica in route.replicas}
        before = dict(self.backends)
        self.backends = {replica: before.get(replica) or Backend(replica, self.measure) for replica in wanted}
        gone = time.monotonic()
        out = {replica for route in routes for replica in route.withheld}
        for replica in before.keys() & out:  # not drained: it hangs, or its answers are wrong
            self.lines.cut(replica.address)
            before.pop(replica).cut()
        self.retired += [(gone, backend) for replica, backend in before.items() if replica not in wanted]
        self.lines.keep_only({replica.address for replica in wanted})
        instances = {replica.instance for replica in wanted}
        for name in self.gates.keys() - instances:
            for lane in ("interactive", "bulk"):
                self.meters.queue.labels(name, lane).set(0)
        self.gates = {name: self.gates.get(name) or Gate(name, self.queue) for name in sorted(instances)}

    def measure(self) -> None:
        """Tell each gate what its ready replicas take at once, as far as it falls to this process."""
        capacity: Counter[str] = Counter()
        for replica, backend in list(self.backends.items()):
            if backend.ready:
                capacity[replica.instance] += max(1, replica.capacity // self.workers)
        for name, gate in list(self.gates.items()):
            gate.resize(capacity[name])

    def count_waiting(self) -> None:
        """The queue of each gate, for the metrics."""
        for name, gate in list(self.gates.items()):
            self.meters.queue.labels(name, "interactive").set(gate.lanes.waiting)
            self.meters.queue.labels(name, "bulk").set(len(gate.turns))

    def close_retired(self) -> None:
        """Close what left the table once its calls have ended: a replica drains before it stops."""
        patience = time.monotonic() - self.retire_secs
        for entry in list(self.retired):
            retired_at, backend = entry
            if backend.outstanding == 0 or retired_at < patience:
                backend.close()
                self.retired.remove(entry)
