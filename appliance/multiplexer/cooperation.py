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
from typing import NamedTuple, Protocol

from greenlet import getcurrent, greenlet


class WouldBlock(Exception):
    """The call has to wait for something else than a reply."""


class Selectable(Protocol):
    def fileno(self) -> int: ...


class Wait(NamedTuple):
    """For what a greenlet waits: a socket, which events of it, and until when (time.monotonic)."""

    source: Selectable
    events: int
    until: float


class Scheduler:
    """Runs calls side by side in the thread that calls `run`."""

    def __init__(self) -> None:
        self.waits: dict[greenlet, Wait] = {}
        self.poll = select.poll()  # of what all of them wait for

    def run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Until all have ended. What one raises ends the others, and is raised."""
        try:
            for call in calls:
                greenlet(call).switch()
            while self.waits:
                for ready in self.ready():
                    self.poll.unregister(self.waits.pop(ready).source)
                    ready.switch()
        finally:
            for left in list(self.waits):
                left.throw()

    def ready(self) -> list[greenlet]:
        """Those that need not wait any more, at least one; in the order in which they began to."""
        nearest = min([each.until for each in self.waits.values()])
        found = {descriptor for descriptor, _ in self.poll.poll(max(0.0, nearest - time.monotonic()) * 1000)}
        now = time.monotonic()
        return [each for each, wait in self.waits.items() if wait.source.fileno() in found or wait.until <= now]

    def wait(self, source: Selectable, events: int, secs: float) -> None:
        """Of a call: let the others run until one of the events is there, or the time is over."""
        current = getcurrent()
        assert current.parent
        self.poll.register(source, events)
        self.waits[current] = Wait(source, events, time.monotonic() + secs)
        current.parent.switch()
