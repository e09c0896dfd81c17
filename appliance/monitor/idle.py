"""Instances that nobody calls are put to sleep, where they ask for it (`idle_unload_secs`).

An instance sleeps after so long without a call, but not before it was up for some times as long as its load takes: one
that is called now and then must not spend its time loading.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

from appliance.core import placement
from appliance.core.problems import Problem
from appliance.core.state import Instance, State
from appliance.drivers import activityfile
from appliance.node.context import Node
from appliance.operations import sleep

log = logging.getLogger(__name__)
LOAD_FACTOR = 3.0  # times its load an instance is up at least
LOOK_SECS = 0.5


class WatchedLaunch(NamedTuple):
    instance: str
    number: int


class SeenUse(NamedTuple):
    """last: as its file says; at: when that was seen first, by time.monotonic."""

    last: float
    at: float


class IdleWatch:
    """`look` is called by one thread; to put an instance to sleep waits for its processes, and is done in `pool`."""

    def __init__(self, node: Node, pool: Executor) -> None:
        self.node = node
        self.pool = pool
        self.ready_since: dict[WatchedLaunch, float] = {}  # by time.monotonic
        self.used: dict[str, SeenUse] = {}  # by instance
        self.going: dict[WatchedLaunch, Future[None]] = {}
        self.looked_at = float("-inf")

    def look(self, state: State, ready: Collection[str]) -> None:
        """ready: the instances of which a replica answers."""
        if time.monotonic() - self.looked_at < LOOK_SECS:
            return
        self.looked_at = time.monotonic()
        watched = {
            WatchedLaunch(each.name, each.launch): each
            for each in state.instances.values()
            if each.spec.idle_unload_secs and each.wanted == "running" and each.name in ready and not each.successor
        }
        now = time.monotonic()  # the clock may be set
        self.ready_since = {launch: self.ready_since.get(launch, now) for launch in watched}
        self.going = {launch: future for launch, future in self.going.items() if not future.done()}
        if not watched:
            return
        used = activityfile.uses(Path(self.node.layout.activity))
        self.used = {name: self.seen_use(name, use.last, now) for name, use in used.items()}
        for launch, instance in watched.items():
            use, seen = used.get(instance.name), self.used.get(instance.name)
            idle_secs = now - max(self.ready_since[launch], seen.at if seen else 0.0)
            busy = use is not None and use.busy
            if not busy and launch not in self.going and idle_secs >= self.longest_idle_secs(instance):
                self.going[launch] = self.pool.submit(self.put_to_sleep, launch, idle_secs)

    def seen_use(self, name: str, last: float, now: float) -> SeenUse:
        before = self.used.get(name)
        return before if before and before.last == last else SeenUse(last, now)

    def longest_idle_secs(self, instance: Instance) -> float:
        load_secs = self.node.load_times.read().get(placement.workload(instance.spec), 0.0)
        return max(instance.spec.idle_unload_secs, LOAD_FACTOR * load_secs)

    def put_to_sleep(self, launch: WatchedLaunch, idle_secs: float) -> None:
        try:
            sleep.sleep_idle(self.node, *launch, idle_secs)
        except Problem as problem:
            log.error('Could not put "%s" to sleep: %s', launch.instance, problem)
