"""Instances that sleep are woken by control, which decides whether there is room: it is asked by a thread for each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from appliance.core.problems import Kind, Problem

log = logging.getLogger(__name__)
WANTED_SECS = 2.0  # so long after the last call that wants it an instance is asked for
# Where there is no room at the moment, or control does not answer, who has waited longest asks again after the first,
# and those behind after so much more each: what was freed is not for whoever happens to come just then.
RETRY_SECS, LONGEST_RETRY_SECS = 0.1, 0.6
REFUSED_SECS = 2.0  # so long a refusal stands
SAID_BY_ROUTING = ("INSTANCE_NOT_FOUND", "NOT_RUNNING")  # of its next look, as long as it is so
MOST_AT_ONCE = 4  # requests: control has others to serve

# (an instance, when its first call came). Raises Problem: unavailable where it makes sense to ask again.
Ask = Callable[[str, float], None]


class Waker:
    """Thread-safe. ask: wakes an instance; before: called before it is asked, in the same thread."""

    def __init__(self, ask: Ask, before: Callable[[], None]) -> None:
        self.ask = ask
        self.before = before
        self.wanted: dict[str, float] = {}  # instance -> when a call wanted it last; time.monotonic
        self.at_work: dict[str, float] = {}  # likewise, the first one; in the order in which they came
        self.refusals: dict[str, tuple[Problem, float]] = {}
        self.obstacles: dict[str, Problem] = {}  # why they do not wake up yet
        self.permits = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.lock = threading.Lock()

    def want(self, instance: str) -> Problem | None:
        """A call needs an instance that sleeps. Returns why it does not wake up yet, as far as that is known.

        Raises: Problem where it was refused for good, a moment ago.
        """
        with self.lock:
            problem, at = self.refusals.get(instance, (None, 0.0))
            if problem and time.monotonic() - at < REFUSED_SECS:
                raise Problem(problem.kind, problem.code, problem.message)
            self.wanted[instance] = time.monotonic()
            if instance in self.at_work:
                return self.obstacles.get(instance)
            self.at_work[instance] = self.wanted[instance]
        try:
            threading.Thread(target=self.keep_asking, args=(instance,), name="wake", daemon=True).start()
        except RuntimeError:  # no more threads: the next call tries again
            self.forget(instance)
            raise
        return None

    def keep_asking(self, instance: str) -> None:
        try:
            time.sleep(self.pause(instance, first=True))
            while not self.is_over(instance):
                time.sleep(self.pause(instance))
        finally:
            self.forget(instance)

    def forget(self, instance: str) -> None:
        with self.lock:
            self.at_work.pop(instance, None)
            self.wanted.pop(instance, None)
            self.obstacles.pop(instance, None)

    def pause(self, instance: str, first: bool = False) -> float:
        """Seconds until an instance is asked for; first: for the first time, which is at once where nobody waits."""
        with self.lock:
            before = list(self.at_work).index(instance)
            waiting = sum(name in self.obstacles for name in list(self.at_work)[:before])
        return min(LONGEST_RETRY_SECS, RETRY_SECS * (waiting + (not first)))

    def is_wanted(self, instance: str) -> bool:
        with self.lock:
            return time.monotonic() - self.wanted[instance] < WANTED_SECS

    def is_over(self, instance: str) -> bool:
        """Whether it was woken, or refused for good, or nobody wants it any more."""
        try:
            with self.permits:
                if not self.is_wanted(instance):
                    return True
                self.before()
                self.ask(instance, self.at_work[instance])
        except Problem as problem:
            if problem.kind is Kind.UNAVAILABLE:
                with self.lock:
                    self.obstacles[instance] = problem
                return False
            if problem.code in SAID_BY_ROUTING:
                return True
            self.refuse(instance, problem)
        return True

    def refuse(self, instance: str, problem: Problem) -> None:
        """To callers it is unavailable, whatever is wrong with it."""
        log.warning('"%s" cannot be woken: %s', instance, problem.message)
        now = time.monotonic()
        told = Problem(Kind.UNAVAILABLE, problem.code, f'"{instance}" cannot wake up: {problem.message}')
        with self.lock:
            self.refusals = {name: each for name, each in self.refusals.items() if now - each[1] < REFUSED_SECS}
            self.refusals[instance] = told, now
