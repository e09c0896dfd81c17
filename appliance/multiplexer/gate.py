"""The door in front of one instance: `core.admission` decides, threads wait here for their turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.core.admission import Lanes, Verdict
from appliance.core.problems import Kind, Problem
from appliance.core.settings import QueueSettings


class Full(Problem):
    """Refused for want of room; ``retry_after_ms`` goes to the caller as trailing metadata."""

    def __init__(self, instance: str, waited: bool, retry_after_ms: int) -> None:
        why = "its queue did not move in time" if waited else "its queue is full"
        super().__init__(
            Kind.EXHAUSTED, "QUEUE_FULL", f'Instance "{instance}" is busy and {why}: try again in {retry_after_ms} ms'
        )
        self.retry_after_ms = retry_after_ms


class Ticket:
    """One waiting call; ``called`` is set when its turn has come, or when its caller is gone."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.admitted = False
        self.gone = False

    def leave(self) -> None:
        self.gone = True
        self.called.set()


class Gate:
    """Admission to one instance from this process."""

    def __init__(self, instance: str, settings: QueueSettings) -> None:
        self.instance = instance
        self.max_wait_secs = settings.max_wait_ms / 1000
        self.lanes = Lanes(0, settings.max_size, settings.interactive_share)
        self.tickets: deque[Ticket] = deque()
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)  # bulk waits here

    def resize(self, capacity: int) -> None:
        """Replicas came or went."""
        with self.lock:
            if capacity != self.lanes.capacity:
                self.lanes.capacity = capacity
                self.call_next()

    @contextmanager
    def single(self, wait_secs: float | None, on_gone: Callable[[Callable[[], None]], object]) -> Iterator[bool]:
        """One text's place; yields whether it had to wait.

        wait_secs: the caller's deadline; on_gone registers what to call when the caller is gone.
        Raises: Full; Problem timeout when the deadline passes in the queue.
        """
        waited = self.enter(wait_secs, on_gone)
        try:
            yield waited
        finally:
            self.leave(interactive=1)

    def enter(self, wait_secs: float | None, on_gone: Callable[[Callable[[], None]], object]) -> bool:
        with self.lock:
            verdict = self.lanes.single()
            if verdict is Verdict.REFUSE:
                raise Full(self.instance, False, self.lanes.retry_after_ms())
            if verdict is Verdict.ADMIT:
                self.lanes.interactive += 1
                return False
            ticket = Ticket()
            self.tickets.append(ticket)
            self.lanes.waiting += 1
        on_gone(ticket.leave)
        patience = min(self.max_wait_secs, wait_secs if wait_secs is not None else self.max_wait_secs)
        ticket.called.wait(patience)
        with self.lock:
            if ticket.admitted and not ticket.gone:
                return True
            if ticket.admitted:  # called and gone at once: the place goes to the next
                self.lanes.interactive -= 1
                self.call_next()
            else:
                self.tickets.remove(ticket)
                self.lanes.waiting -= 1
            retry_after = self.lanes.retry_after_ms()
        if ticket.gone:
            raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        if wait_secs is not None and wait_secs <= self.max_wait_secs:
            raise Problem(Kind.TIMEOUT, "TIMEOUT", f'The deadline passed in the queue of instance "{self.instance}"')
        raise Full(self.instance, True, retry_after)

    def try_bulk(self, cost: int) -> bool:
        """Places for a slice of ``cost`` texts, if there is room now."""
        with self.lock:
            if not self.lanes.room_for_bulk(cost):
                return False
            self.lanes.bulk += cost
            return True

    def wait_bulk(self, cost: int, gone: Callable[[], bool]) -> bool:
        """Places for ``cost`` texts, as soon as there is room; False when ``gone`` turned true first."""
        with self.room:
            while not self.lanes.room_for_bulk(cost):
                if gone():
                    return False
                self.room.wait(timeout=0.2)
            self.lanes.bulk += cost
            return True

    def leave(self, interactive: int = 0, bulk: int = 0) -> None:
        with self.lock:
            self.lanes.interactive -= interactive
            self.lanes.bulk -= bulk
            self.lanes.answered(interactive + bulk, time.monotonic())
            self.call_next()

    def call_next(self) -> None:
        """Call whoever waits, as far as there is room. Under the lock."""
        while self.tickets and self.lanes.room_for_single:
            ticket = self.tickets.popleft()
            self.lanes.waiting -= 1
            self.lanes.interactive += 1
            ticket.admitted = True
            ticket.called.set()
        self.room.notify()
