"""The probes of all replicas, in threads beside the looks; of one replica one at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.monitor.cache_guard import CacheGuard
from appliance.monitor.golden import TEXTS as GOLDEN_TEXTS
from appliance.monitor.golden import Golden
from appliance.node.context import Node, now, now_ms
from appliance.node.probe import Heard, ProbeTarget, ServedModel, probe
from appliance.node.probe_round import Questions, ask_together
from appliance.node.servable import vectors_of

log = logging.getLogger(__name__)


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
    """pid: of the process that is asked."""

    pid: int | None
    outcome: Future[Outcome]


class HeardOf(NamedTuple):
    """What is remembered of the process with that id."""

    pid: int | None
    heard: Heard


class CalmProbe(NamedTuple):
    """Of a replica that was well. note: what is left to do when the questions are answered, if anything. alone: to do
    when not."""

    questions: Questions
    note: Callable[[], Outcome] | None
    alone: Callable[[], Outcome]
    outcome: Future[Outcome]


class Probing:
    """Used by the thread that looks. checked_at: when each replica was last probed, as the state writes times.

    Replicas that are well are asked together, after each look; who does not answer soon is asked again, alone, in a
    thread of the pool, as all others are.
    """

    def __init__(self, node: Node, golden: Golden, cache_guard: CacheGuard, pool: ThreadPoolExecutor) -> None:
        self.node = node
        self.golden = golden
        self.cache_guard = cache_guard
        self.pool = pool
        self.rounds = ThreadPoolExecutor(1, thread_name_prefix="probes")
        self.next_round: list[CalmProbe] = []
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
        calm: bool,
    ) -> None:
        """golden: the answer is compared with the golden ones. hear: called in another thread when it has ended.
        calm: the replica was well until now, so it may be asked in the next round."""
        key, outcome = ReplicaKey(instance.stem, replica), Future[Outcome]()
        of = self.heard_of(key, pid, instance)
        outcome.add_done_callback(hear)
        alone = partial(self.ask, instance, replica, deadline_secs, golden, of)
        if calm and of.heard.model.type is not None:
            ports = (instance.ports[replica], instance.prometheus_ports[replica])
            texts = GOLDEN_TEXTS if golden else ()
            questions = Questions(*ports, self.node.marker(instance, replica), of.heard, texts)
            notes = golden or self.cache_guard.awaits_fingerprint(instance, replica, pid)
            note = partial(self.note_answers, instance, replica, of, questions, now_ms()) if notes else None
            self.next_round.append(CalmProbe(questions, note, alone, outcome))
        else:
            run(self.pool, alone, outcome)
        self.probes[key] = RunningProbe(pid, outcome)

    def begin_round(self) -> None:
        """Ask all that may be asked together."""
        probes, self.next_round = self.next_round, []
        if not probes:
            return
        try:
            asked = self.rounds.submit(self.ask_round, probes)
            asked.add_done_callback(Future.result)  # what it raises is logged
        except RuntimeError as error:
            for each in probes:
                end(each.outcome, error)

    def ask_round(self, probes: Sequence[CalmProbe]) -> None:
        try:
            ask_together(self.node, [each.questions for each in probes])
        finally:
            for each in probes:
                if not each.questions.answered:
                    run(self.pool, each.alone, each.outcome)
                elif each.note:  # it may take seconds, and the next round does not wait for it
                    run(self.pool, each.note, each.outcome)
                else:
                    end(each.outcome, Outcome(ProbeResult.ANSWERED, "", compared=False, at=time.monotonic()))

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
                result, detail = self.cache_guard.noting(instance, replica, of.pid, now_ms(), compare)
            else:
                self.cache_guard.note_fingerprint(instance, replica, of.pid)
        return Outcome(result, detail, golden and result is not ProbeResult.BUSY, time.monotonic())

    def note_answers(
        self, instance: Instance, replica: int, of: HeardOf, questions: Questions, began_ms: int
    ) -> Outcome:
        """What follows from those of a round. began_ms: before these, since 1970."""
        result, detail, at = ProbeResult.ANSWERED, "", time.monotonic()
        if questions.texts:
            compare = partial(self.golden.judge, instance, questions.port, questions.messages)
            result, detail = self.cache_guard.noting(instance, replica, of.pid, began_ms, compare)
        else:
            self.cache_guard.note_fingerprint(instance, replica, of.pid)
        return Outcome(result, detail, bool(questions.texts), at)


def run(pool: ThreadPoolExecutor, work: Callable[[], Outcome], outcome: Future[Outcome]) -> None:
    """Do the work in a thread; its result, or what it raises, becomes the outcome."""
    try:
        pool.submit(work).add_done_callback(lambda done: end(outcome, done.exception() or done.result()))
    except RuntimeError as error:  # no thread can be started; what was submitted may be done later all the same
        end(outcome, error)


def end(outcome: Future[Outcome], result: Outcome | BaseException) -> None:
    """Unless it has ended."""
    if outcome.done():
        return
    if isinstance(result, BaseException):
        outcome.set_exception(result)
    else:
        outcome.set_result(result)
