"""Generations that take over from one another, and those that do not come up.

    a successor, all of whose replicas answer      takes over, if its golden answers are right where they have to be
    one that is quarantined, or finds its port     is given up: the generation that is called goes on
    taken by another program
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

from filelock import Timeout

from appliance.core.health import Record
from appliance.core.problems import Problem
from appliance.core.state import Instance, State
from appliance.monitor.golden import Golden
from appliance.monitor.idle import WatchedLaunch
from appliance.monitor.probing import ReplicaKey
from appliance.monitor.rolling import Watched, seen_of
from appliance.node.context import Node
from appliance.operations import replacement

log = logging.getLogger(__name__)
GOLDEN_SECS = 30.0  # from its first answer a successor has so long to answer the golden texts


class Replacements:
    """`advance` is called by one thread."""

    def __init__(self, node: Node, golden: Golden, pool: Executor) -> None:
        self.node = node
        self.golden = golden
        self.pool = pool
        self.under_way: dict[WatchedLaunch, Future[None]] = {}
        self.answering_since: dict[WatchedLaunch, float] = {}  # successors, of time.monotonic

    def advance(
        self, state: State, watched: Mapping[ReplicaKey, Watched], records: Mapping[ReplicaKey, Record]
    ) -> None:
        """As far as the replicas were looked at since the state is what it is."""
        successors = [each.successor for each in state.instances.values() if each.successor]
        coming = {WatchedLaunch(each.name, each.launch) for each in successors}
        self.answering_since = {launch: at for launch, at in self.answering_since.items() if launch in coming}
        for instance in state.instances.values():
            if instance.predecessor and time.time() >= instance.predecessor.kept_until:
                self.drop(instance.predecessor, "after undo_secs")
            after = instance.successor
            if after and after.quarantined:
                self.drop(after, next(iter(after.quarantined.values())))
            elif after:
                replicas = seen_of(after, watched, records)
                if replicas and all(each.answers for each in replicas.values()):
                    self.take_over(instance, after)

    def take_over(self, instance: Instance, successor: Instance) -> None:
        if successor.must_agree and (why := self.why_not(instance, successor)) != "":
            if why:
                self.drop(successor, why)
            return
        try:
            replacement.take_over(self.node, instance, successor)
        except (Problem, Timeout) as problem:
            log.error('The next generation of "%s" waits: %s', instance.name, problem)

    def why_not(self, instance: Instance, successor: Instance) -> str | None:
        """Why a successor must not take over whose vectors have to go together with those so far; empty where it may,
        None as long as that is not known."""
        since = self.answering_since.setdefault(WatchedLaunch(successor.name, successor.launch), time.monotonic())
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

    def drop(self, generation: Instance, why: str) -> None:
        """A successor or a predecessor, whose processes end."""
        act = replacement.let_go if generation.kept_until else replacement.give_up
        self.submit(generation, partial(act, self.node, generation, why))

    def fall_back(self, instance: Instance, reason: str) -> None:
        self.submit(instance, partial(replacement.fall_back, self.node, instance.name, instance.launch, reason))

    def submit(self, generation: Instance, work: Callable[[], None]) -> None:
        self.under_way = {launch: future for launch, future in self.under_way.items() if not future.done()}
        launch = WatchedLaunch(generation.name, generation.launch)
        if launch not in self.under_way:
            self.under_way[launch] = self.pool.submit(done, launch, work)


def done(launch: WatchedLaunch, work: Callable[[], None]) -> None:
    try:
        work()
    except (Problem, Timeout) as problem:
        log.error('"%s" keeps the processes of launch %s for now: %s', *launch, problem)
