"""Generations that take over from one another, and those that do not come up.

    a successor, all of whose replicas answer      takes over, if its golden answers are right where they have to be
    one that is quarantined, does not answer in    is given up: the generation that is called goes on
    time, or finds its port taken
    a predecessor whose time is over, or that is   is let go
    quarantined
    one that was replaced in place, and does not   falls back to what it was
    start

To end processes takes a while, and is done in the pool, once for each launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial

from appliance.core import generations
from appliance.core.health import Record
from appliance.core.problems import Problem
from appliance.core.program import startup_timeout
from appliance.core.state import Instance, State
from appliance.monitor.golden import Golden
from appliance.monitor.idle import WatchedLaunch
from appliance.monitor.probing import ReplicaKey
from appliance.monitor.rolling import Watched, seen_of
from appliance.node.context import Node
from appliance.operations import replacement

log = logging.getLogger(__name__)
GOLDEN_SECS = 90.0  # so long the golden answers may take: all replicas are compared once a minute


class Replacements:
    """`advance` is called by one thread."""

    def __init__(self, node: Node, golden: Golden, pool: Executor) -> None:
        self.node = node
        self.golden = golden
        self.pool = pool
        self.under_way: dict[WatchedLaunch, Future[None]] = {}
        self.begun: dict[WatchedLaunch, float] = {}  # successors: when they were seen first, of time.monotonic
        self.answering_since: dict[WatchedLaunch, float] = {}

    def advance(
        self, state: State, watched: Mapping[ReplicaKey, Watched], records: Mapping[ReplicaKey, Record]
    ) -> None:
        """As far as the replicas were looked at since the state is what it is."""
        successors = [each.successor for each in state.instances.values() if each.successor]
        now = time.monotonic()
        self.begun = {launch: self.begun.get(launch, now) for launch in map(launch_of, successors)}
        self.answering_since = {launch: at for launch, at in self.answering_since.items() if launch in self.begun}
        for instance in state.instances.values():
            if instance.predecessor and time.time() >= instance.predecessor.kept_until:
                self.drop(instance.predecessor, "after undo_secs")
            if after := instance.successor:
                self.advance_one(instance, after, watched, records)
            elif instance.falls_back and instance.quarantined:  # whoever was to do it has not got to it
                self.fall_back(instance, next(iter(instance.quarantined.values())))

    def advance_one(
        self,
        instance: Instance,
        after: Instance,
        watched: Mapping[ReplicaKey, Watched],
        records: Mapping[ReplicaKey, Record],
    ) -> None:
        replicas = seen_of(after, watched, records)
        longest_secs = startup_timeout(after, self.node.settings) + GOLDEN_SECS
        if after.quarantined:
            self.drop(after, next(iter(after.quarantined.values())))
        elif replicas and all(each.answers for each in replicas.values()):
            # A rolling restart ends first: what is kept for an undo has to be whole.
            if not instance.rolling:
                answers = any(each.answers for each in seen_of(instance, watched, records).values())
                self.take_over(instance, after, answers)
        elif time.monotonic() - self.begun[launch_of(after)] > longest_secs:
            self.drop(after, f"not all of its replicas answered within {longest_secs:.0f} s")

    def take_over(self, instance: Instance, successor: Instance, answers: bool) -> None:
        """answers: whether the generation that is called so far does. Where there never was an answer there is nothing
        to go together with."""
        has_answered = answers or self.golden.kept(instance) is not None
        if has_answered and successor.must_agree and (why := self.why_not(instance, successor)) != "":
            if why:
                self.drop(successor, why)
            return
        try:
            replacement.take_over(self.node, instance, successor, has_answered)
        except Problem as problem:
            log.error('The next generation of "%s" waits: %s', instance.name, problem)

    def why_not(self, instance: Instance, successor: Instance) -> str | None:
        """Why a successor must not take over whose vectors have to go together with those so far; empty where it may,
        None as long as that is not known."""
        since = self.answering_since.setdefault(launch_of(successor), time.monotonic())
        differs = self.golden.disagreement(successor, instance)
        if differs:
            return f"its vectors do not go together with those so far: {differs}"
        if differs is None and time.monotonic() - since > GOLDEN_SECS:
            return f"its answers to the golden texts could not be compared with those so far within {GOLDEN_SECS:.0f} s"
        return differs

    def is_beside(self, instance: Instance) -> bool:
        """Whether this generation is not the one that is called."""
        current = self.node.state.read().instances.get(instance.name)
        launches = [each.launch for each in current.generations[1:]] if current else []
        return instance.launch in launches

    def prove(self, instance: Instance) -> None:
        """A replica of the generation that is called answers, so that it stays. Repeated until it is written down."""
        if self.is_beside(instance):
            return
        try:
            self.node.state.update(partial(generations.prove, name=instance.name, launch=instance.launch))
        except Problem as problem:
            log.error('That "%s" answers cannot be written down yet: %s', instance.name, problem.message)

    def drop(self, generation: Instance, why: str) -> None:
        """A successor or a predecessor, whose processes end."""
        act = replacement.let_go if generation.kept_until else replacement.give_up
        self.submit(generation, partial(act, self.node, generation, why))

    def fall_back(self, instance: Instance, reason: str) -> None:
        self.submit(instance, partial(replacement.fall_back, self.node, instance.name, instance.launch, reason))

    def submit(self, generation: Instance, work: Callable[[], object]) -> None:
        self.under_way = {launch: future for launch, future in self.under_way.items() if not future.done()}
        launch = launch_of(generation)
        if launch not in self.under_way:
            self.under_way[launch] = self.pool.submit(done, launch, work)


def launch_of(generation: Instance) -> WatchedLaunch:
    return WatchedLaunch(generation.name, generation.launch)


def done(launch: WatchedLaunch, work: Callable[[], object]) -> None:
    try:
        work()
    except Problem as problem:
        log.error('"%s" keeps the processes of launch %s for now: %s', *launch, problem)
