"""The replicas that calls may go to: kept in step with the state file by one thread, and chosen from by every call."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from appliance.core import routing
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Table, Target
from appliance.core.settings import QueueSettings
from appliance.drivers.http2 import Connection
from appliance.drivers.metrics import Meters
from appliance.drivers.reachability import Reachability
from appliance.drivers.tei import Backend
from appliance.multiplexer.activity import Activity
from appliance.multiplexer.admission_queue import AdmissionQueue, AdmissionQueues
from appliance.multiplexer.arrivals import Arrivals
from appliance.multiplexer.connection_pool import ConnectionPool
from appliance.multiplexer.leases import ReplicaLeases
from appliance.multiplexer.node_link import NodeLink
from appliance.multiplexer.remote_replicas import RemoteReplicas
from appliance.multiplexer.suspicion import Suspicion, Suspicions, launch_of
from appliance.multiplexer.waker import Waker
from appliance.node.directory import Directory
from appliance.wire import validity
from appliance.wire.calls import CallFailed, Code, Status

log = logging.getLogger(__name__)
TICK_SECS = 0.1
MEASURE_TICKS = 10  # the queues are looked at every tenth tick
PROVE_TICKS = 3  # replicas whose line and proof differ are looked at again every third tick
EXCLUSIVE_POLL_SECS = 0.01  # how often a suspect tries to get a replica of its own


class Retired(NamedTuple):
    """A replica that is in the table no more, and may still have calls in work."""

    since: float  # seconds of time.monotonic
    backend: Backend


class ReplicaPool:
    """Backends by replica. Read from any thread; changed by `follow` alone.

    workers: multiplexer processes on this machine, which share the capacity of every replica; number: of this one.
    """

    def __init__(
        self,
        directory: Directory,
        node_link: NodeLink,
        remote: RemoteReplicas,
        meters: Meters,
        queue_settings: QueueSettings,
        workers: int,
        retire_secs: float,
        number: int = 0,
    ) -> None:
        self.directory = directory
        self.node_link = node_link
        self.remote = remote
        self.workers = workers
        self.retire_secs = retire_secs
        self.backends: dict[Replica, Backend] = {}
        self.followed_table: Table | None = None
        self.queues = AdmissionQueues(queue_settings, meters)
        self.retired: list[Retired] = []
        self.follow_lock = threading.Lock()
        self.leases = ReplicaLeases()
        self.suspicions = Suspicions(node_link.report_conviction, deaths=1 if workers == 1 else 2)
        self.reachability = Reachability(directory.notice())
        self.connections = ConnectionPool(remote.connect, self.is_proved)
        self.waker = Waker(node_link.wake, before=partial(self.note_activity, at_once=True))
        self.arrivals = Arrivals(
            queue_settings, lambda: directory.table, self.was_ready, node_link.load_left, self.waker.want
        )
        self.activity = Activity(node_link.activity_file(number), self.arrivals.wanted)
        # By whether one looks: a call that begins anew picks again, and two picks each would leave out every other one.
        self.picks = {looks: itertools.count(routing.first_tie(number)) for looks in (True, False)}
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

        look: where no backend is ready, read the state file and the ports once more, because the last look may be a
        tenth of a second old. So a call that follows the answer `running` of REST finds its replica.
        """
        backends, table = self.backends, self.directory.table
        try:
            ready = [backends[each] for each in routing.candidates(table, target) if backends[each].ready]
        except (Problem, KeyError):
            ready = []
        if ready:
            return ready
        if look:
            self.follow()
        self.directory.require()
        backends = self.backends
        replicas = routing.candidates(self.directory.table, target)
        if look:
            ready = [backends[each] for each in replicas if each in backends and backends[each].look()]
        if not ready:
            if look:
                self.refuse_stopped(replicas)
            raise routing.none_ready(replicas)
        return ready

    def refuse_stopped(self, replicas: Collection[Replica]) -> None:
        """Raises: Problem precondition when an operator has stopped all of them with supervisorctl."""
        names = sorted({replica.instance for replica in replicas})
        if all(replica.is_local for replica in replicas) and all(map(self.node_link.is_stopped, names)):
            raise routing.stopped(names[0])

    def pick(self, target: Target, without: Collection[Backend] = (), look: bool = True) -> Backend:
        """The least busy ready backend that is not one of ``without``. Raises: Problem as `ready`."""
        ready = self.ready(target, look)
        backend = routing.pick(ready, self.load, next(self.picks[look]), without)
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
        """A call that its caller gave up may have ended its replica all the same."""
        for replica, backend in list(self.backends.items()):
            if backend.ready or not backend.abandoned:
                continue
            if replica.is_peer:  # an appliance does not end because of a call
                backend.forget_abandoned()
                continue
            suspicion = self.suspicion(replica)
            for call in backend.forget_abandoned():
                if call.alone:
                    suspicion.died_alone(call.method, call.digest, replica)
                else:
                    suspicion.suspect_digests([call.digest], replica)

    def ended_by_itself(self, gone: Replica) -> bool:
        """Whether a replica that went away should still run: no start, restart, stop or deletion has ended it."""
        self.follow()
        return gone in self.backends

    def generations(self, target: Target) -> tuple[tuple[str, int], ...]:
        """Of what a target names: answers of two generations do not go into one batch."""
        return routing.generations_of(self.directory.table, target)

    def was_ready(self, replicas: Collection[Replica], since: float) -> bool:
        """Whether one of the replicas was ready since then, of time.monotonic: it is away for a moment."""
        backends = self.backends
        return any(each in backends and backends[each].ready_at > since for each in replicas)

    def queue(self, backend: Backend) -> AdmissionQueue:
        """The queue of the backend's instance."""
        return self.queues.get(backend.replica.instance)

    def is_shared(self, instance: str) -> bool:
        """Whether Envoy, too, sends calls to the replicas, or another appliance: they may be full when by our count
        they are not."""
        routes = [route for route in self.directory.table.all if route.name == instance]
        return any(route.express or not all(each.is_local for each in route.replicas) for route in routes)

    def suspicion(self, replica: Replica) -> Suspicion:
        """That of the replica's launch."""
        return self.suspicions.get(launch_of(replica))

    def flaw(self, backend: Backend, method: str, request: bytes, reply: bytes) -> str | None:
        """What is wrong with a reply, its vector's width among the replicas of one launch included."""
        wrong, width = validity.inspect(method, request, reply)
        if wrong:
            return wrong
        if width is None or width == backend.width:
            return None
        launch = launch_of(backend.replica)
        siblings = [each for replica, each in self.backends.items() if launch_of(replica) == launch]
        expected = next((each.width for each in (backend, *siblings) if each.width), None)
        if expected is None or expected == width:
            backend.width = width
            return None
        return f"its vector has {width} numbers, and others had {expected}"

    def report_doubt(self, backend: Backend) -> None:
        """What it answered cannot be right: the monitor is to compare it with its golden answers at once."""
        self.node_link.report_doubt(backend.replica)

    @contextmanager
    def exclusive_lease(
        self, target: Target, until: float, second_replica_until: float, active: Callable[[], bool]
    ) -> Iterator[Backend]:
        """A replica that has no other call of this process, as soon as there is one.

        until: seconds of time.monotonic; second_replica_until: until then not the last replica that is ready.
        Raises: Problem when there is none in time, or the caller is gone.
        """
        while True:
            backend = self.pick_for_suspect(target, second_replica_until)
            if backend and self.leases.acquire(backend.replica, exclusive=True):
                break
            if not active():
                raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
            if time.monotonic() > until:
                raise routing.none_ready(routing.candidates(self.directory.table, target))
            time.sleep(EXCLUSIVE_POLL_SECS)
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
    def connection(self, backend: Backend, may_wait: bool = True) -> Iterator[Connection]:
        """For one call. Raises: CallFailed when the replica does not listen; WouldBlock as `ConnectionPool.acquire`."""
        connection = self.acquire_connection(backend, may_wait)
        try:
            yield connection
        finally:
            self.connections.release(backend.replica, connection)

    def is_proved(self, replica: Replica, connection: Connection) -> bool:
        """Whether a new connection leads to the replica. Raises: OSError when that cannot be known."""
        if replica.is_local:
            return self.node_link.is_proved(replica)
        if replica.is_peer:
            return True  # it says each second what it has, and is told with each call which instance is meant
        info, backend = self.remote.info(replica, connection), self.backends.get(replica)
        if backend and info:
            backend.info = info
        elif backend:
            backend.refute()
        return info is not None

    def acquire_connection(self, backend: Backend, may_wait: bool = True) -> Connection:
        """As `connection`; whoever asks releases it."""
        try:
            return self.connections.acquire(backend.replica, may_wait)
        except OSError as error:
            raise CallFailed(Status(Code.UNAVAILABLE, f"{error.strerror or error}"), False, begun=False) from error

    def keep_in_step(self) -> None:
        for tick in itertools.count():
            if self.ended.is_set():
                return
            try:
                self.reachability.run(TICK_SECS)
                self.follow()
                self.suspect_abandoned()
                self.note_activity()
                if tick % MEASURE_TICKS == 0:
                    self.resize_queues()
                    self.queues.measure()
                if tick % PROVE_TICKS == 0:
                    for backend in self.backends.values():
                        backend.prove_again()
                self.close_retired()
            except Exception:
                log.exception("Keeping the pool in step failed; trying again")

    def note_activity(self, at_once: bool = False) -> None:
        self.activity.note(self.directory.state.instances, self.backends, at_once)

    def follow(self) -> None:
        """Connect to new replicas, retire those that are gone. From any thread."""
        self.directory.refresh()
        with self.follow_lock:
            self.adopt(self.directory.table)

    def adopt(self, table: Table) -> None:
        if table is self.followed_table:
            return
        self.followed_table = table
        self.node_link.note_launches(table.all)
        wanted = {replica for route in table.all if route.wanted == "running" for replica in route.replicas}
        ejected = {replica for route in table.all for replica in route.ejected}
        before = dict(self.backends)
        self.backends = {replica: before.get(replica) or self.connect(replica) for replica in wanted}
        for replica in before.keys() & ejected:  # not drained: it hangs, or its answers are wrong
            before.pop(replica).cut()
            self.connections.cut(replica)
        now = time.monotonic()
        self.retired += [Retired(now, backend) for replica, backend in before.items() if replica not in wanted]
        self.connections.keep_only(wanted)
        self.suspicions.keep_only({launch_of(replica) for replica in wanted})
        self.queues.keep_only({replica.instance for replica in wanted})
        self.resize_queues()
        self.arrivals.notify()

    def connect(self, replica: Replica) -> Backend:
        proved = partial(self.node_link.is_proved, replica) if replica.is_local else None
        watch = partial(self.reachability.watch, secure=self.remote.secure(replica))
        return Backend(replica, proved, self.hear_of_change, watch)

    def hear_of_change(self) -> None:
        """A replica became ready, or is not any more."""
        self.resize_queues()
        self.arrivals.notify()

    def resize_queues(self) -> None:
        """Give each queue the capacity of its ready replicas, as far as it falls to this process."""
        capacity: Counter[str] = Counter()
        for replica, backend in list(self.backends.items()):
            if backend.ready:
                capacity[replica.instance] += max(1, replica.capacity // self.workers)
        self.queues.resize(capacity)

    def close_retired(self) -> None:
        """Close retired backends once their calls have ended: a replica drains before it stops."""
        earliest = time.monotonic() - self.retire_secs
        for retired in list(self.retired):
            if retired.backend.outstanding == 0 or retired.since < earliest:
                retired.backend.close()
                self.retired.remove(retired)
