"""The probes of all replicas: each runs in a thread, beside the looks; of one replica one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.monitor.cache_guard import CacheGuard
from appliance.monitor.golden import Golden
from appliance.node.context import Node, now
from appliance.node.probe import Heard, ProbeTarget, ServedModel, probe
from appliance.node.servable import vectors_of

log = logging.getLogger(__name__)
HELD_UP_SECS = 0.5


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


Hear = Callable[[Future[Outcome]], None]


class RunningProbe(NamedTuple):
    """begun_at: by time.monotonic. in_turn: beside none, and behind those that were begun before."""

    pid: int | None
    work: Callable[[], Outcome]
    hear: Hear
    begun_at: float
    in_turn: bool
    outcome: Future[Outcome]


class HeardOf(NamedTuple):
    """What is remembered of the process with that id."""

    pid: int | None
    heard: Heard


class Probing:
    """Used by the thread that looks. checked_at: when each replica was last probed, as the state writes times.

    Probes of replicas that are well run one after the other: an answer takes some milliseconds, and ten threads at once
    would spend a third of their time on getting the interpreter from each other. Where one holds the others up, these
    and the next ones run at once, as all others do.
    """

    def __init__(self, node: Node, golden: Golden, cache_guard: CacheGuard, pool: ThreadPoolExecutor) -> None:
        self.node = node
        self.golden = golden
        self.cache_guard = cache_guard
        self.pool = pool
        self.turns = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self.probes: dict[ReplicaKey, RunningProbe] = {}
        self.heard: dict[ReplicaKey, HeardOf] = {}
        self.checked_at: dict[ReplicaKey, str] = {}

    def begin(
        self,
        instance: Instance,
        replica: int,
        pid: int | None,
        deadline_secs: float,
        golden: bool,
        hear: Hear,
        in_turn: bool,
    ) -> None:
        """golden: the answer is compared with the golden ones. hear: called in another thread when it has ended.
        in_turn: it may wait for others."""
        key = ReplicaKey(instance.stem, replica)
        work = partial(self.ask, instance, replica, deadline_secs, golden, self.heard_of(key, pid, instance))
        self.run(key, pid, work, hear, in_turn and not self.held_up())

    def run(self, key: ReplicaKey, pid: int | None, work: Callable[[], Outcome], hear: Hear, in_turn: bool) -> None:
        outcome = (self.turns if in_turn else self.pool).submit(work)
        self.probes[key] = RunningProbe(pid, work, hear, time.monotonic(), in_turn, outcome)
        outcome.add_done_callback(lambda ended: None if ended.cancelled() else hear(ended))  # else it is begun anew

    def held_up(self) -> list[ReplicaKey]:
        """The probes that have not ended in the time that many take in turn."""
        late = time.monotonic() - HELD_UP_SECS
        return [
            key
            for key, each in self.probes.items()
            if each.in_turn and each.begun_at < late and not each.outcome.done()
        ]

    def hurry(self) -> None:
        """Nobody waits any longer for a probe that holds up the others."""
        for key in self.held_up():
            waiting = self.probes[key]
            if waiting.outcome.cancel():
                self.run(key, waiting.pid, waiting.work, waiting.hear, in_turn=False)

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
            proved=partial(self.node.listeners.proved, marker=self.node.marker(instance, replica)),
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
