"""Several calls to replicas in one thread: each is a greenlet that runs until it waits for the reply of its replica.

Why not a thread for each: to wake one up and to hand the interpreter over takes as long as what is then to be done. The
third leg of a call was sent 1.0 ms after the first one, and is 0.6 in one thread (2 cores, greenlet 3.5).

Only for replies do greenlets wait together. Whatever else a call would have to wait for, a place in a queue or a
replica that starts, would hold up all of them: there `WouldBlock` is raised, and its call begins anew in a thread of
its own.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from greenlet import getcurrent, greenlet

from appliance.core.problems import Problem

Picked = TypeVar("Picked")


class WouldBlock(Exception):
    """The call has to wait for something else than a reply."""


class Selectable(Protocol):
    def fileno(self) -> int: ...


class ReplyScheduler(Protocol):
    """Whoever has several calls in one thread."""

    def wait(self, source: Selectable, events: int, secs: float) -> None:
        """Of a call: let the others run until one of the events is there, or the time is over."""


def looking(scheduler: ReplyScheduler | None, pick: Callable[[bool], Picked]) -> Callable[[bool], Picked]:
    """``pick``, whose argument is whether to look at files and ports once more. That takes some milliseconds: beside
    others of a thread there is no look, and what is not found begins anew. Its result raises: Problem; WouldBlock."""

    def pick_inline(_: bool) -> Picked:
        try:
            return pick(False)
        except Problem:
            raise WouldBlock from None

    return pick if scheduler is None else pick_inline


class Scheduler:
    """Runs calls side by side in the thread that calls `run`."""

    def __init__(self) -> None:
        self.waiting: dict[int, greenlet] = {}  # by the descriptor for which it waits
        self.until: dict[int, float] = {}  # likewise; of time.monotonic
        self.poll = select.poll()

    def run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Until all have ended. What one raises ends the others, and is raised."""
        try:
            for call in calls:
                greenlet(call).switch()
            while self.waiting:
                for descriptor in self.ready():
                    self.poll.unregister(descriptor)
                    del self.until[descriptor]
                    self.waiting.pop(descriptor).switch()
        finally:
            for left in list(self.waiting.values()):
                left.throw()

    def ready(self) -> list[int]:
        """For what need not be waited any more, in the order in which that was begun; now and then nothing."""
        nearest = min(self.until.values())
        found = [descriptor for descriptor, _ in self.poll.poll(max(0.0, nearest - time.monotonic()) * 1000)]
        now = time.monotonic()
        if now < nearest:
            return found
        return [descriptor for descriptor, until in self.until.items() if until <= now or descriptor in found]

    def wait(self, source: Selectable, events: int, secs: float) -> None:
        """Of a call: let the others run until one of the events is there, or the time is over."""
        current, descriptor = getcurrent(), source.fileno()
        assert current.parent
        self.poll.register(descriptor, events)
        self.waiting[descriptor], self.until[descriptor] = current, time.monotonic() + secs
        current.parent.switch()
