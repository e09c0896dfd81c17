"""The monitor's work: look at every replica, let `core.health` decide, act through the verbs of `operations`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from filelock import Timeout

from appliance.core import health, placement
from appliance.core.events import Cause, Event
from appliance.core.health import Act, Action, Look, Policy, ProbeResult, Record
from appliance.core.layout import JOB_PREFIX
from appliance.core.problems import Problem
from appliance.core.program import MARKER, startup_timeout
from appliance.core.state import Instance, State
from appliance.core.status import ALIVE, Process
from appliance.drivers.listeners import ListenerTable, marker_of
from appliance.drivers.metrics import Meters
from appliance.monitor.cache_guard import CacheGuard
from appliance.monitor.convictions import Convictions
from appliance.monitor.golden import Golden
from appliance.monitor.idle import IdleWatch
from appliance.monitor.machine import MachineWatch
from appliance.monitor.probing import Outcome, Probing, ReplicaKey
from appliance.monitor.recording import Recording
from appliance.monitor.replacements import Replacements
from appliance.monitor.rolling import Watched, advance_all
from appliance.node import benchmarks, model_overview
from appliance.node.context import Node
from appliance.operations import cache, models, repairs, supervision, supply

log = logging.getLogger("appliance.monitor")
LOOK_SECS = 1.0  # between two looks where nothing happens
CALM_SECS = 30.0  # between two looks at everything while all is well, should one of supervisord's events be lost
CHECK_SECS = 5.0  # between two checks, while all is well, that the processes are still those of the last look
NO_PROGRAM = "is gone: supervisor does not have its program"
RECONCILE_SECS, FIRST_RECONCILE_SECS = 60.0, 5.0  # a monitor that was killed may have left a change half done
PROBES_AT_ONCE = 64


class Doubt(NamedTuple):
    """An answer of a replica cannot be right."""

    instance: str
    launch: int
    replica: int


class Monitor:
    """All replicas of one appliance. `tick` is called from one thread; probes run beside it, one for each replica.

    wake: called when a probe tells something new, so that the next look comes at once.
    """

    def __init__(self, node: Node, meters: Meters, wake: Callable[[], None]) -> None:
        self.meters = meters
        self.wake = wake
        self.node = node
        self.golden = Golden(Path(node.layout.golden), partial(model_overview.digests, node))
        self.cache_guard = CacheGuard(node)
        self.pool = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="probe")
        self.probing = Probing(node, self.golden, self.cache_guard, self.pool)
        self.records: dict[ReplicaKey, Record] = {}
        self.watched: dict[ReplicaKey, Watched] = {}
        self.state: State | None = None  # at the last look
        self.processes: list[Process] = []  # of supervisord, at the last look
        self.looked_at = self.checked_at = float("-inf")
        self.all_settled = False  # as `health.settled`, all replicas at the last look
        self.reconciled_at = time.monotonic() - RECONCILE_SECS + FIRST_RECONCILE_SECS
        self.machine = MachineWatch(node)
        self.recording = Recording(node, self.golden)
        self.doubts: SimpleQueue[Doubt] = SimpleQueue()
        self.doubted: set[Doubt] = set()  # until the golden answers are compared
        self.idle_watch = IdleWatch(node, self.pool)
        self.replacements = Replacements(node, self.golden, self.pool)
        self.repairing: Future[None] | None = None
        self.moving: dict[str, Future[None]] = {}
        self.convictions = Convictions(node.journal)
        self.remember()

    def remember(self) -> None:
        """What an earlier monitor has seen of the processes that run: no news to this one, nor to the next."""
        for stem, index, launch, pid, ready, checked_at in self.node.health.processes():
            key = ReplicaKey(stem, index)
            self.records[key] = Record(launch, pid=pid, ready=ready)
            self.probing.checked_at[key] = checked_at

    def doubt(self, name: str, replica: int, launch: int) -> None:
        """A caller got an answer that cannot be right. From any thread."""
        self.doubts.put(Doubt(name, launch, replica))
        self.wake()

    def tick(self, woken: bool = True) -> None:
        """A look at everything; or, where all was calm and nothing has woken us, only at probes, and at the processes
        themselves: a look at 100 replicas takes 15 ms. Raises: Problem when the state or supervisord cannot be
        read."""
        now = time.monotonic()
        if woken:
            self.all_settled = False  # also for the next look, if this one fails
        self.machine.examine(now)
        while not self.doubts.empty():
            self.doubted.add(self.doubts.get())
        state = self.node.state.read()
        rolling = [each for each in state.instances.values() if each.rolling]
        replacing = any(each.successor for each in state.instances.values())
        nothing_new = self.all_settled and not rolling and not replacing and not self.doubted and state is self.state
        try:
            if nothing_new and now - self.looked_at < CALM_SECS and self.check(state, now):
                for key, watched in self.watched.items():
                    if self.probing.has_ended(key) or health.due(self.records[key], now + LOOK_SECS / 2):
                        self.judge(key, watched.instance, watched.look, now)
            else:
                self.look_at_all(state, now)
        finally:
            self.probing.begin_round()
        advance_all(self.node, rolling, self.watched, self.records)
        self.replacements.advance(state, self.watched, self.records)
        ready = {key for key, record in self.records.items() if record.ready}
        self.idle_watch.look(state, {each.instance.name for key, each in self.watched.items() if key in ready})
        if now - self.reconciled_at >= RECONCILE_SECS and (self.repairing is None or self.repairing.done()):
            self.reconciled_at = now
            self.repairing = self.pool.submit(self.repair, state)  # stopping a group may take half a minute

    def check(self, state: State, now: float) -> bool:
        """Whether all processes are still those of the last look, where it is time to see that; and what a look at
        everything does for those who read what we write."""
        if now - self.checked_at < CHECK_SECS:
            return True
        self.checked_at = now
        if not all(self.is_as_seen(key, watched) for key, watched in self.watched.items()):
            return False
        self.write_down(state, now)
        return True

    def is_as_seen(self, key: ReplicaKey, watched: Watched) -> bool:
        """Whether the process of the last look still runs: the kernel tells it in 20 us, without supervisord."""
        instance, look = watched
        if look.pid is None or look.state not in ALIVE:
            return True
        return marker_of(look.pid, MARKER) == self.node.marker(instance, key.replica)

    def write_down(self, state: State, now: float) -> None:
        self.write_health(state)
        answering = {record.pid for record in self.records.values() if record.ready and record.pid}
        self.machine.measure(now, state, self.processes, answering)
        self.recording.look(now, state, self.processes, answering)

    def look_at_all(self, state: State, now: float) -> None:
        self.all_settled = False  # unless all of this goes well
        for name in state.instances:
            self.meters.begin(name)
        self.processes = self.node.supervisor.processes()
        processes = {(each.group, each.name): each for each in self.processes}
        table = self.node.listening()
        wanted = [each for each in state.generations if each.wanted == "running" and not each.lacks_model]
        for instance in wanted:
            for index in range(instance.spec.replicas):
                key = ReplicaKey(instance.stem, index)
                process = processes.get((instance.name, instance.process(index)))
                look = self.look(instance, index, process, table)
                self.watched[key] = Watched(instance, look)
                self.judge(key, instance, look, now)
        self.forget_others({ReplicaKey(each.stem, index) for each in wanted for index in range(each.spec.replicas)})
        launches = {(each.name, each.launch) for each in wanted}
        self.doubted = {each for each in self.doubted if (each.instance, each.launch) in launches}
        self.write_down(state, now)
        jobs = [each for (group, _), each in processes.items() if group.startswith(JOB_PREFIX)]
        if any(each.state not in ALIVE for each in jobs):
            models.settle(self.node)
        self.state, self.looked_at, self.checked_at = state, now, now
        settled = all(health.settled(self.records[key], watched.look) for key, watched in self.watched.items())
        self.all_settled = settled and not jobs

    def judge(self, key: ReplicaKey, instance: Instance, look: Look, now: float) -> None:
        """Do what follows from a look at a replica and from its probe, if that has ended, and begin the next one."""
        policy = self.policy(instance)
        record = self.records.get(key)
        outcome = self.probing.take(key, look.pid)
        if outcome and record:
            record = health.probed(record, outcome.result, outcome.compared, policy, outcome.at)
            if outcome.result in (ProbeResult.MISSED, ProbeResult.WRONG):
                self.meters.failures.labels(instance.name).inc()
        if outcome:
            look = replace(look, probe=outcome.result, detail=outcome.detail)
        # A probe in work was asked before the doubt.
        doubt = Doubt(instance.name, instance.launch, key.replica)
        if record and doubt in self.doubted and not self.probing.is_running(key):
            record = health.doubted(record)
            self.doubted.remove(doubt)
        record, actions = health.decide(record, look, policy, now)
        self.records[key] = record
        for action in actions:
            self.act(instance, key.replica, look, action)
        if record.ready and instance.unproved:
            self.replacements.prove(instance)
        calm = health.calm(record, look)
        # In calm at the look that is nearest to the time.
        due = health.due(record, now + LOOK_SECS / 2 if calm else now)
        if look.listening and not self.probing.is_running(key) and not look.quarantined and due:
            compared = record.golden_at <= now
            hear = partial(self.hear, doubt, calm)
            self.probing.begin(instance, key.replica, look.pid, health.deadline(record), compared, hear, calm)

    def hear(self, doubt: Doubt, calm: bool, outcome: Future[Outcome]) -> None:
        """A probe has ended. The answer of a replica that is well waits for the next look: of 100 replicas ten answer
        each second, and a look at all of them takes 15 ms here and 20 in supervisord. doubt: there may be of it."""
        well = outcome.exception() is None and outcome.result().result is ProbeResult.ANSWERED
        if not (calm and well) or doubt in self.doubted:
            self.wake()

    def policy(self, instance: Instance) -> Policy:
        settings = self.node.settings
        return Policy(
            interval_secs=settings.health_check_interval_secs,
            max_failures=settings.max_failures_before_restart,
            startup_secs=startup_timeout(instance, settings),
            movable=instance.spec.port is None,
        )

    def look(self, instance: Instance, index: int, process: Process | None, table: ListenerTable) -> Look:
        record = self.records.get(ReplicaKey(instance.stem, index))
        # Between its end and supervisor's notice, or the next one's first moment, a process is there and not its own.
        gone = "ended, and supervisor did not know how yet" if process else NO_PROGRAM
        process = self.node.of_this_launch(instance, index, process)
        alive = process is not None and process.state in ALIVE
        listening = alive and self.node.proved(instance, index, table)
        stranger = None if listening or index in instance.quarantined else self.node.stranger(instance, index, table)
        return Look(
            launch=instance.launch,
            state=process.state if process else "ABSENT",
            pid=process.pid if process else None,
            uptime=process.uptime if process else None,
            ending=process.ending if process else gone,
            # A replica that has answered listens; if it does not any more, its next probe says so.
            listening=listening or bool(alive and record and record.ready and process and record.pid == process.pid),
            ejected=index in instance.ejected,
            quarantined=index in instance.quarantined,
            stranger=str(stranger or ""),
            excused=self.convictions.of(instance, index) if record and record.deaths else 0,
        )

    def act(self, instance: Instance, index: int, look: Look, action: Action) -> None:
        done: dict[Act, Callable[[], None]] = {
            Act.READY: lambda: self.note_ready(instance, index, look),
            Act.DIED: lambda: repairs.note_death(self.node, instance, index, action.reason),
            Act.STOPPED: lambda: None if index in instance.rolling else repairs.note_stop(self.node, instance, index),
            Act.START: lambda: repairs.start_again(self.node, instance, index),
            Act.MOVE: lambda: self.move(instance, action.reason),
            Act.EJECT: lambda: repairs.eject(self.node, instance, index, action.reason),
            Act.READMIT: lambda: repairs.readmit(self.node, instance, index),
            Act.RESTART: lambda: repairs.replace_process(
                self.node, instance, index, look.pid or 0, cause_of(look), action.reason
            ),
            Act.QUARANTINE: lambda: self.quarantine(instance, index, look, action.reason),
            Act.STOP: lambda: repairs.keep_stopped(self.node, instance, index),
        }
        try:
            done[action.act]()
        except (Problem, OSError) as error:  # the next replica's turn comes all the same
            log.error("Could not %s replica %s of %s: %s", action.act, index, instance.stem, error)

    def note_ready(self, instance: Instance, index: int, look: Look) -> None:
        """Its load is measured, to a second: callers that wait for the next one are told."""
        name = instance.name
        self.node.journal.record(Event.READY, name, f'Replica {index} of "{name}" answers', replica=index)
        if look.uptime is not None:
            self.meters.loads.labels(name).observe(look.uptime)
            with suppress(OSError, Timeout):  # it is measured again
                self.node.load_times.put(placement.workload(instance.spec), round(look.uptime, 1))

    def quarantine(self, instance: Instance, index: int, look: Look, reason: str) -> None:
        if self.replacements.is_beside(instance):
            self.replacements.drop(instance, repairs.with_last_lines(self.node, instance, index, reason))
            return
        repairs.quarantine(self.node, instance, index, look, reason)
        if instance.unproved:
            self.replacements.fall_back(instance, reason)

    def move(self, instance: Instance, reason: str) -> None:
        """Beside the looks: processes are replaced, which waits for them."""
        name = instance.name
        if self.replacements.is_beside(instance):
            self.replacements.drop(instance, reason)
        elif name not in self.moving or self.moving[name].done():
            self.moving[name] = self.pool.submit(self.moved, name)

    def moved(self, name: str) -> None:
        try:
            repairs.move(self.node, name)
        except Problem as problem:
            log.error('Could not give "%s" another port: %s', name, problem.message)

    def forget_others(self, wanted: set[ReplicaKey]) -> None:
        for key in self.records.keys() - wanted:
            del self.records[key]
            self.probing.forget(key)
        for key in self.watched.keys() - wanted:
            del self.watched[key]

    def write_health(self, state: State) -> None:
        """Write what was measured, for `health_check_failures` and `last_health_check`."""
        entries: dict[str, dict[str, Any]] = {}
        by_stem = {each.stem: each for each in state.generations}
        for key, checked_at in self.probing.checked_at.items():
            record, instance = self.records.get(key), by_stem.get(key.stem)
            if record and instance and record.launch == instance.launch:
                entry = entries.setdefault(key.stem, {"launch": record.launch, "replicas": {}})
                measured = {"failures": record.misses, "checked_at": checked_at}
                entry["replicas"][str(key.replica)] = {**measured, "pid": record.pid, "ready": record.ready}
        try:
            self.node.health.write(entries)
        except OSError as error:
            log.error("Cannot write %s: %s", self.node.health.path, error)

    def repair(self, state: State) -> None:
        """Once a minute: what supervisor runs is what the state wants, and nothing else of ours runs."""
        try:
            self.mend(state)
        except (Problem, OSError) as problem:
            log.error("Looking again in a minute: %s", problem)

    def mend(self, state: State) -> None:
        changed = supervision.reconcile(self.node, ())  # what other processes are at is left to them
        if changed:
            self.node.journal.record(Event.RECONCILED, None, f"Made supervisor match the state: {', '.join(changed)}")
        models.settle(self.node)
        supply.supply_missed(self.node)
        supervision.end_orphans(self.node)
        supervision.set_stale_logs_aside(self.node)
        state = self.node.state.read()  # who came meanwhile is not forgotten
        stems = {each.stem for each in state.generations}
        self.golden.forget_others(stems)
        self.recording.forget_others(state.instances.keys())
        benchmarks.forget_others(self.node, set(state.instances))
        self.cache_guard.forget_others(stems)
        cache.finish(self.node)


def cause_of(look: Look) -> Cause:
    """Of a restart, as its metric's label."""
    return Cause.WRONG_ANSWERS if look.probe is ProbeResult.WRONG else Cause.MISSED_PROBES
