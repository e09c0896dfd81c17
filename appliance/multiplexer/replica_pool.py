"""The connections to all replicas of the table, and the queue of each instance, kept in step with it by one thread."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from appliance.core import routing
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Table, Target
from appliance.core.settings import QueueSettings
from appliance.drivers.http2 import UNAVAILABLE, CallFailed, Connection
from appliance.drivers.metrics import Meters
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue
from appliance.multiplexer.connection_pool import ConnectionPool
from appliance.multiplexer.leases import ReplicaLeases
from appliance.multiplexer.node_link import NodeLink
from appliance.multiplexer.suspicion import Suspicion
from appliance.node.directory import Directory
from appliance.wire import validity

log = logging.getLogger(__name__)
TICK_SECS = 0.1
COUNT_TICKS = 10  # how often the queues are counted
QUIET_POLL_SECS = 0.01  # how often one that wants a replica alone looks for one
WAKE_TICKS = 3  # an unconnected channel is asked to connect every third tick


class ReplicaPool:
    """Backends by replica. Looked at from any thread; changed by `follow` alone.

    workers: multiplexer processes on this machine, which share the capacity of every replica.
    """

    def __init__(
        self,
        directory: Directory,
        node_link: NodeLink,
        meters: Meters,
        queue_settings: QueueSettings,
        workers: int,
        retire_secs: float,
    ) -> None:
        self.directory = directory
        self.node_link = node_link
        self.meters = meters
        self.queue_settings = queue_settings
        self.workers = workers
        self.retire_secs = retire_secs
        self.backends: dict[Replica, Backend] = {}
        self.followed_table: Table | None = None
        self.queues: dict[str, AdmissionQueue] = {}
        self.retired: list[tuple[float, Backend]] = []
        self.follow_lock = threading.Lock()
        self.leases = ReplicaLeases()
        self.suspicions: dict[tuple[str, int], Suspicion] = {}  # of each launch of an instance
        self.connections = ConnectionPool(node_link.is_proved)
        self.picks = itertools.count()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep_in_step, name="pool", daemon=True)

    def start(self) -> None:
        self.follow()
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def ready(self, target: Target, look: bool = True) -> list[Backend]:
        """The ready backends of a target. Raises: Problem as `routing.candidates`, or unavailable for none.

        Nobody is turned away on the strength of what was true a moment ago: where no backend is ready, the state file
        and the ports are looked at once more. So a call that follows the answer `running` of REST finds its replica.
        """
        backends, table = self.backends, self.directory.table
        try:
            able = [backends[each] for each in routing.candidates(table, target) if backends[each].ready]
        except (Problem, KeyError):
            able = []
        if able:
            return able
        if look:
            self.follow()
        self.directory.require()
        backends = self.backends
        replicas = routing.candidates(self.directory.table, target)
        able = [backends[each] for each in replicas if each in backends and look and backends[each].look()]
        if not able:
            if look:
                self.refuse_stopped(replicas)
            raise routing.none_ready(replicas)
        return able

    def refuse_stopped(self, replicas: Collection[Replica]) -> None:
        """Raises: Problem precondition when an operator has stopped all of them with supervisorctl."""
        names = sorted({replica.instance for replica in replicas})
        if all(self.node_link.is_stopped(name) for name in names):
            raise routing.stopped(names[0])

    def pick(self, target: Target, without: Collection[Backend] = (), look: bool = True) -> Backend:
        """The least busy ready backend that is not one of ``without``. Raises: Problem as `ready`."""
        ready = self.ready(target, look)
        backend = routing.pick(ready, self.load, next(self.picks), without)
        if backend is None:
            raise routing.none_ready([each.replica for each in ready])
        return backend

    def load(self, backend: Backend) -> float:
        """Outstanding texts; without bound while the replica takes no call beside others."""
        return math.inf if self.leases.refuses_sharers(backend.replica) else backend.outstanding

    def has_others(self, target: Target, gone: Backend) -> bool:
        """Whether a target has replicas besides ``gone``, connected or not."""
        try:
            return any(replica != gone.replica for replica in routing.candidates(self.directory.table, target))
        except Problem:
            return False

    def suspect_abandoned(self) -> None:
        """What callers gave up may have ended its replica all the same."""
        for replica, backend in list(self.backends.items()):
            if backend.ready or not backend.abandoned:
                continue
            suspicion = self.suspicion(replica)
            for digest, method, alone in backend.outlived():
                if alone:
                    suspicion.died_alone(method, digest, replica)
                else:
                    suspicion.suspect_digests([digest], replica)

    def ended_by_itself(self, gone: Replica) -> bool:
        """Whether a replica that went away shall still run: no start, restart, stop or deletion has ended it."""
        self.follow()
        return gone in self.backends

    def comes_back(self, target: Target, within_secs: float) -> bool:
        """Whether a target has several replicas, and one of them was ready within the last seconds."""
        try:
            replicas = routing.candidates(self.directory.table, target)
        except Problem:
            return False
        since = time.monotonic() - within_secs
        backends = self.backends
        return len(replicas) > 1 and any(each in backends and backends[each].ready_at > since for each in replicas)

    def queue(self, backend: Backend) -> AdmissionQueue:
        """The queue of the backend's instance."""
        name = backend.replica.instance
        return self.queues.get(name) or self.queues.setdefault(name, AdmissionQueue(name, self.queue_settings))

    def suspicion(self, replica: Replica) -> Suspicion:
        key = (replica.instance, replica.launch)
        return self.suspicions.get(key) or self.suspicions.setdefault(key, self.new_suspicion(key))

    def flaw(self, backend: Backend, method: str, request: bytes, reply: bytes) -> str | None:
        """What is wrong with a reply, its vector's width among the replicas of one launch included."""
        if wrong := validity.flaw(method, request, reply):
            return wrong
        width = validity.width(method, request, reply)
        if width is None or width == backend.width:
            return None
        mine = backend.replica
        siblings = [
            each
            for replica, each in self.backends.items()
            if (replica.instance, replica.launch) == (mine.instance, mine.launch)
        ]
        known = next((each.width for each in (backend, *siblings) if each.width), None)
        if known is None or known == width:
            backend.width = width
            return None
        return f"its vector has {width} numbers, and others had {known}"

    def new_suspicion(self, key: tuple[str, int]) -> Suspicion:
        return Suspicion(*key, self.node_link.report_conviction, deaths=1 if self.workers == 1 else 2)

    def report_doubt(self, backend: Backend) -> None:
        """What it answered cannot be right: the monitor shall compare it with its golden answers at once."""
        self.node_link.report_doubt(backend.replica)

    @contextmanager
    def exclusive_lease(
        self, target: Target, until: float, second_replica_until: float, active: Callable[[], bool]
    ) -> Iterator[Backend]:
        """A replica without any other call of ours, as soon as one is ready, and another one beside it.

        until, second_replica_until: seconds of time.monotonic; after the second one the last replica is taken, too.
        Raises: Problem when none comes free in time, or the caller is gone.
        """
        while True:
            backend = self.pick_for_suspect(target, second_replica_until)
            if backend and self.leases.acquire(backend.replica, exclusive=True):
                break
            if not active():
                raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
            if time.monotonic() > until:
                raise routing.none_ready(routing.candidates(self.directory.table, target))
            time.sleep(QUIET_POLL_SECS)
        try:
            yield backend
        finally:
            self.leases.release(backend.replica, exclusive=True)

    def pick_for_suspect(self, target: Target, second_replica_until: float) -> Backend | None:
        """The least busy ready backend; None while there is none, or only the last one of several."""
        try:
            ready = self.ready(target)
        except Problem as problem:
            if problem.kind is not Kind.UNAVAILABLE:
                raise
            return None
        is_only_one = len(routing.candidates(self.directory.table, target)) == 1
        if len(ready) == 1 and not is_only_one and time.monotonic() < second_replica_until:
            return None
        return routing.pick(ready, lambda backend: backend.outstanding)

    @contextmanager
    def connection(self, backend: Backend) -> Iterator[Connection]:
        """A connection to the backend for one call. Raises: CallFailed when nobody listens."""
        try:
            connection = self.connections.acquire(backend.replica)
        except OSError as error:
            raise CallFailed(UNAVAILABLE, f"{error.strerror or error}", [], answered=False, begun=False) from error
        try:
            yield connection
        finally:
            self.connections.release(backend.replica, connection)

    def keep_in_step(self) -> None:
        for tick in itertools.count():
            if self.ended.wait(TICK_SECS):
                return
            try:
                self.follow()
                self.resize_queues()
                self.suspect_abandoned()
                if tick % COUNT_TICKS == 0:
                    self.count_waiting()
                if tick % WAKE_TICKS == 0:
                    for backend in self.backends.values():
                        backend.wake()
                self.close_retired()
            except Exception:
                log.exception("Keeping the pool in step failed; trying again")

    def follow(self) -> None:
        """Connect to new replicas, retire those that are gone. From any thread."""
        self.directory.refresh()
        with self.follow_lock:
            self.adopt(self.directory.table)

    def adopt(self, table: Table) -> None:
        if table is self.followed_table:
            return
        self.followed_table = table
        routes = table.routes
        wanted = {replica for route in routes if route.wanted == "running" for replica in route.replicas}
        before = dict(self.backends)
        self.backends = {replica: before.get(replica) or self.connect(replica) for replica in wanted}
        gone = time.monotonic()
        out = {replica for route in routes for replica in route.withheld}
        for replica in before.keys() & out:  # not drained: it hangs, or its answers are wrong
            self.connections.cut(replica)
            before.pop(replica).cut()
        self.retired += [(gone, backend) for replica, backend in before.items() if replica not in wanted]
        self.connections.keep_only(wanted)
        launches = {(replica.instance, replica.launch) for replica in wanted}
        self.suspicions = {key: suspicion for key, suspicion in self.suspicions.items() if key in launches}
        instances = {replica.instance for replica in wanted}
        for name in self.queues.keys() - instances:
            for lane in ("interactive", "bulk"):
                self.meters.queue.labels(name, lane).set(0)
        self.queues = {
            name: self.queues.get(name) or AdmissionQueue(name, self.queue_settings) for name in sorted(instances)
        }

    def connect(self, replica: Replica) -> Backend:
        return Backend(replica, lambda: self.node_link.is_proved(replica), self.resize_queues)

    def resize_queues(self) -> None:
        """Tell each queue what its ready replicas take at once, as far as it falls to this process."""
        capacity: Counter[str] = Counter()
        for replica, backend in list(self.backends.items()):
            if backend.ready:
                capacity[replica.instance] += max(1, replica.capacity // self.workers)
        for name, queue in list(self.queues.items()):
            queue.resize(capacity[name])

    def count_waiting(self) -> None:
        """How many wait in each queue, for the metrics."""
        for name, queue in list(self.queues.items()):
            self.meters.queue.labels(name, "interactive").set(queue.lanes.waiting)
            self.meters.queue.labels(name, "bulk").set(len(queue.bulk_waiters))

    def close_retired(self) -> None:
        """Close what left the table once its calls have ended: a replica drains before it stops."""
        longest_ago = time.monotonic() - self.retire_secs
        for entry in list(self.retired):
            retired_at, backend = entry
            if backend.outstanding == 0 or retired_at < longest_ago:
                backend.close()
                self.retired.remove(entry)
