"""The probes of all replicas: each runs in a thread, beside the looks; of one replica one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.drivers.listeners import ListenerTable, listening
from appliance.monitor.cache_guard import CacheGuard
from appliance.monitor.golden import Golden
from appliance.node.context import Node, now
from appliance.node.probe import Heard, ProbeTarget, ServedModel, probe
from appliance.node.servable import vectors_of

log = logging.getLogger(__name__)
GATHER_SECS = 0.005


class ReplicaKey(NamedTuple):
    """stem: of a generation's processes; of the one that is called mostly the name of the instance."""

    stem: str
    replica: int


class Outcome(NamedTuple):
    """Of a probe. detail: why it is not an answer; compared: whether the golden answers were; at: its end, by
    time.monotonic."""

    result: ProbeResult
    detail: str
    compared: bool
    at: float


class RunningProbe(NamedTuple):
    pid: int | None
    outcome: Future[Outcome]


class HeardOf(NamedTuple):
    """What is remembered of the process with that id."""

    pid: int | None
    heard: Heard


class FreshListening:
    """Who listens, for threads that ask at the same time: none gets a table that was read before it asked.

    The probes of a look begin together, and a table takes 0.4 to 0.9 ms of CPU with 100 replicas: the first that asks
    waits a moment for the others.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read_at = float("-inf")
        self.table = ListenerTable({})

    def current(self, since: float | None = None) -> ListenerTable:
        """since: one that was read after that will do. Raises: OSError without a free file descriptor."""
        since = time.monotonic() if since is None else since
        with self.lock:
            if self.read_at <= since:
                time.sleep(GATHER_SECS)
                began = time.monotonic()
                self.table = listening()
                self.read_at = began
            return self.table


class Probing:
    """Used by the thread that looks. checked_at: when each replica was last probed, as the state writes times."""

    def __init__(self, node: Node, golden: Golden, cache_guard: CacheGuard, pool: ThreadPoolExecutor) -> None:
        self.node = node
        self.golden = golden
        self.cache_guard = cache_guard
        self.pool = pool
        self.probes: dict[ReplicaKey, RunningProbe] = {}
        self.heard: dict[ReplicaKey, HeardOf] = {}
        self.checked_at: dict[ReplicaKey, str] = {}
        self.listening = FreshListening()

    def begin(
        self,
        instance: Instance,
        replica: int,
        pid: int | None,
        deadline_secs: float,
        golden: bool,
        hear: Callable[[Future[Outcome]], None],
    ) -> None:
        """golden: the answer is compared with the golden ones. hear: called in another thread when it has ended."""
        key = ReplicaKey(instance.stem, replica)
        work = partial(self.ask, instance, replica, deadline_secs, golden, self.heard_of(key, pid, instance))
        future = self.pool.submit(work)
        future.add_done_callback(hear)
        self.probes[key] = RunningProbe(pid, future)

    def is_running(self, key: ReplicaKey) -> bool:
        """Or has ended and was not taken yet."""
        return key in self.probes

    def has_ended(self, key: ReplicaKey) -> bool:
        return key in self.probes and self.probes[key].outcome.done()

    def take(self, key: ReplicaKey, pid: int | None) -> Outcome | None:
        """The outcome of the probe that has ended, once; None if there is none, or if it asked another process."""
        if not self.has_ended(key):
            return None
        probe = self.probes.pop(key)
        self.checked_at[key] = now()
        if probe.pid != pid:
            return None
        try:
            return probe.outcome.result()
        except Exception as error:  # of the probe itself: it says nothing of the replica
            log.exception("A probe of %s failed", tuple(key))
            return Outcome(ProbeResult.BUSY, str(error), compared=False, at=time.monotonic())

    def forget(self, key: ReplicaKey) -> None:
        self.heard.pop(key, None)
        self.checked_at.pop(key, None)

    def heard_of(self, key: ReplicaKey, pid: int | None, instance: Instance) -> HeardOf:
        """What is remembered of this process; another one begins anew."""
        if key not in self.heard or self.heard[key].pid != pid:
            self.heard[key] = HeardOf(pid, Heard(model=ServedModel(vectors=vectors_of(instance.spec))))
        return self.heard[key]

    def ask(self, instance: Instance, replica: int, deadline_secs: float, golden: bool, of: HeardOf) -> Outcome:
        target = ProbeTarget(
            instance.ports[replica],
            instance.prometheus_ports[replica],
            proved=partial(self.proved, self.node.marker(instance, replica)),
            model=of.heard.model,
        )
        with target.on_one_connection() as connected:
            result, detail = probe(connected, deadline_secs, of.heard)
            if result is ProbeResult.ANSWERED and golden:
                compare = partial(self.golden.check, instance, connected)
                result, detail = self.cache_guard.noting(instance, replica, of.pid, compare)
            else:
                self.cache_guard.note_fingerprint(instance, replica, of.pid)
        return Outcome(result, detail, golden and result is not ProbeResult.BUSY, time.monotonic())

    def proved(self, marker: str, port: int, since: float | None = None) -> bool:
        try:
            return self.node.listeners.proved(port, marker, self.listening.current(since))
        except OSError:
            return False
