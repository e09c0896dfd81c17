"""Calls that come before a replica of their target is ready: they wait, as long as one is on its way.

    what the target has                       then its call
    a replica that was ready a moment ago     waits: it is coming back
    an instance that starts or restarts       waits (`wait_for_start`), unless its measured load takes far longer than
                                              the call has
    an instance that sleeps                   wakes it, and waits likewise
    none of these                             is refused at once, with where to look

Whoever is refused is told how long the load is still going to take, where it was measured before. As many calls wait
for an instance as its queue has places, and for all of them no more than leave threads to the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from appliance.core import routing
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.routing import Replica, Route, Table, Target
from appliance.core.settings import QueueSettings

# A replica that was ready within these seconds is away for a moment: an engine listens again a second after its death,
# TEI after some more.
RETURN_SECS = 10.0
POLL_SECS, LOOK_SECS = 0.25, 0.25  # of each who waits, where nothing is heard; of all of them together
MOST_WAITING = 512  # calls in one process
OBSTACLE_MS = 1000  # after that it makes sense to try again where there was no room
TOO_LONG = 2.0  # a load that takes so many times what the call has is not waited for: its time is known to a second

Choice = TypeVar("Choice")


class Limits(NamedTuple):
    """How long a call may wait: until then, of time.monotonic, and while ``active`` says that its caller is there."""

    until: float
    active: Callable[[], bool]


class Coming(NamedTuple):
    """A replica is on its way. left_secs: until it answers; None where that is not known.

    obstacle: why it has not begun to load yet.
    """

    left_secs: float | None = None
    obstacle: Problem | None = None

    @property
    def retry_after_ms(self) -> int | None:
        return None if self.left_secs is None else max(100, round(self.left_secs * 1000))


class Arrivals:
    """Thread-safe. table: the present one. was_ready: whether one of these replicas was ready since then.

    starting: the seconds that are left of the load of an instance, None where they are not known; raises LookupError
    for one that is not on its way. wake: of an instance that sleeps; returns why it does not wake up yet, and raises
    Problem where it cannot.
    """

    def __init__(
        self,
        settings: QueueSettings,
        table: Callable[[], Table],
        was_ready: Callable[[Collection[Replica], float], bool],
        starting: Callable[[str], float | None],
        wake: Callable[[str], Problem | None],
    ) -> None:
        self.settings = settings
        self.table = table
        self.was_ready = was_ready
        self.starting = starting
        self.wake = wake
        self.waiting: Counter[str] = Counter()  # calls by instance
        self.used: Counter[str] = Counter()  # batches, likewise
        self.changes = 0  # so often something changed for those who wait
        self.changed = threading.Condition()
        self.looked_at = float("-inf")

    def notify(self) -> None:
        """A replica became ready or went away, or the table is another one."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def until_ready(self, target: Target, choose: Callable[[bool], Choice], limits: Callable[[], Limits]) -> Choice:
        """What ``choose`` returns, as soon as there is a replica to choose; its argument: look at the ports once more.

        Raises: its Problem where none is on its way, or comes too late.
        """
        changes = self.changes
        try:
            return choose(True)
        except Problem as problem:
            if problem.kind is not Kind.UNAVAILABLE:
                raise
            refusal = problem
        since, limits_ = time.monotonic() - RETURN_SECS, limits()
        with self.place(target):
            while True:
                arrival = self.arrival(target, since)
                if arrival is None:
                    raise refusal
                left = limits_.until - time.monotonic()
                if left <= 0 or not limits_.active() or (arrival.left_secs or 0.0) > TOO_LONG * left:
                    raise told(refusal, arrival)
                self.wait(changes, min(POLL_SECS, left))
                changes = self.changes
                try:
                    return choose(self.may_look())
                except Problem as problem:
                    if problem.kind is not Kind.UNAVAILABLE:
                        raise
                    refusal = problem

    def arrival(self, target: Target, since: float) -> Coming | None:
        """Why a replica of the target will be ready; None where nothing says so. since: of time.monotonic.

        Raises: Problem where an instance that sleeps cannot wake up.
        """
        try:
            routes = [route for route in routing.routes_of(self.table(), target) if route.is_offered]
        except Problem:
            return None
        awake, asleep = [each for each in routes if not each.sleeping], [each for each in routes if each.sleeping]
        known = [each for route in awake if (each := self.start_of(route))]
        known = known if self.settings.wait_for_start else []
        if not known and self.was_ready([replica for route in awake for replica in route.replicas], since):
            return Coming()
        if not known and asleep:  # the others have failed, or lack their model
            known = self.woken(asleep)
        if not self.settings.wait_for_start:
            return None
        return min(known, key=lambda each: math.inf if each.left_secs is None else each.left_secs, default=None)

    def woken(self, asleep: Sequence[Route]) -> list[Coming]:
        """Why one of these instances will be ready: of the first one that can wake up now; else of the first one.

        Raises: Problem where none can.
        """
        held_up: list[Coming] = []
        refused: list[Problem] = []
        for route in asleep:
            try:
                obstacle = self.wake(route.name)
            except Problem as problem:
                refused.append(problem)
                continue
            start = self.start_of(route)
            if start and not obstacle:
                return [start]
            held_up += [Coming(None, obstacle)] if start else []
        if refused and not held_up:
            raise refused[0]
        return held_up[:1]

    def start_of(self, route: Route) -> Coming | None:
        """Of one that starts, or wakes up; None where nobody here knows more of it than that it was ready once."""
        if route.arrival:  # the cluster starts what is missing, unless it has given up
            return None if route.arrival == "failed" else Coming()
        if not route.is_local or not (route.replicas or route.falls_back):
            return None
        try:
            return Coming(self.starting(route.name))
        except LookupError:
            return None

    def wait(self, changes: int, secs: float) -> None:
        """Until something has changed since there were so many changes, or so long."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != changes, timeout=secs)

    def may_look(self) -> bool:
        """One of those who wait looks at the ports, for all."""
        now = time.monotonic()
        with self.changed:
            if now - self.looked_at < LOOK_SECS:
                return False
            self.looked_at = now
            return True

    def wanted(self) -> set[str]:
        """The instances for which calls wait, or which a batch uses."""
        with self.changed:
            return {*self.waiting, *self.used}

    @contextmanager
    def place(self, target: Target) -> Iterator[None]:
        """A place among those who wait. Raises: Problem exhausted."""
        try:
            names = [route.name for route in routing.routes_of(self.table(), target)]
        except Problem:
            names = []
        with self.changed:
            most = max((self.waiting[name] for name in names), default=0)
            is_full = most >= max(1, self.settings.max_size) or sum(self.waiting.values()) >= MOST_WAITING
            if not is_full:
                self.waiting.update(names)
        if is_full:  # told without the lock: supervisord may have to be asked
            words = f"No replica of {', '.join(map(quoted, names))} is ready yet, and {most} calls wait for one"
            raise Problem(Kind.EXHAUSTED, "QUEUE_FULL", f"{words}: try again later", self.retry_after_ms(names))
        try:
            yield
        finally:
            with self.changed:
                self.waiting.subtract(names)
                self.waiting += Counter()  # without those that are 0

    @contextmanager
    def using(self, target: Target) -> Iterator[None]:
        """A block that uses what a target names, also while nothing of it is in work."""
        try:
            names = [route.name for route in routing.routes_of(self.table(), target)]
        except Problem:
            names = []
        with self.changed:
            self.used.update(names)
        try:
            yield
        finally:
            with self.changed:
                self.used.subtract(names)
                self.used += Counter()

    def retry_after_ms(self, names: Collection[str]) -> int:
        for name in names:
            try:
                return Coming(self.starting(name)).retry_after_ms or 1000
            except LookupError:
                continue
        return 1000


def told(refusal: Problem, arrival: Coming) -> Problem:
    """The refusal, with the time that is left where it is known."""
    if arrival.obstacle:
        return Problem(refusal.kind, arrival.obstacle.code, arrival.obstacle.message, OBSTACLE_MS)
    if arrival.left_secs is None:
        return refusal
    words = f"{refusal.message}; by its last load it answers in {arrival.left_secs:.1f} s"
    return Problem(refusal.kind, refusal.code, words, arrival.retry_after_ms)
