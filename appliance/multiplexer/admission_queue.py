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

BULK_POLL_SECS = 0.1  # how often a waiting stream looks whether its caller is still there


class Full(Problem):
    """Refused for want of room."""

    def __init__(self, instance: str, waited: bool, retry_after_ms: int) -> None:
        why = "its queue did not move in time" if waited else "its queue is full"
        super().__init__(
            Kind.EXHAUSTED,
            "QUEUE_FULL",
            f'Instance "{instance}" is busy and {why}: try again in {retry_after_ms} ms',
            retry_after_ms,
        )


class Ticket:
    """One waiting call; ``called`` is set when its turn has come, or when its caller is gone."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.admitted = False
        self.gone = False

    def leave(self) -> None:
        self.gone = True
        self.called.set()


class Turn:
    """One that waits for room in the bulk lane; ``wake`` is called when it should try."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class AdmissionQueue:
    """Admission to one instance from this process."""

    def __init__(self, instance: str, settings: QueueSettings) -> None:
        self.instance = instance
        self.max_wait_secs = settings.max_wait_ms / 1000
        self.lanes = Lanes(0, settings.max_size, settings.interactive_share)
        self.tickets: deque[Ticket] = deque()
        self.lock = threading.Lock()
        self.turns: deque[Turn] = deque()  # of bulk, first come first

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
                raise Full(self.instance, False, self.lanes.refused(time.monotonic()))
            if verdict is Verdict.ADMIT:
                if self.lanes.idle:
                    self.lanes.begin(time.monotonic())
                self.lanes.interactive += 1
                return False
            ticket = Ticket()
            self.tickets.append(ticket)
            self.lanes.waiting += 1
        if on_gone(ticket.leave) is False:  # gone already
            ticket.leave()
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
        if ticket.gone:
            raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        if wait_secs is not None and wait_secs <= self.max_wait_secs:
            raise Problem(Kind.TIMEOUT, "TIMEOUT", f'The deadline passed in the queue of instance "{self.instance}"')
        with self.lock:
            raise Full(self.instance, True, self.lanes.refused(time.monotonic()))

    def retry_after_ms(self) -> int:
        """What to tell a caller whom the replica itself has refused."""
        with self.lock:
            return self.lanes.refused(time.monotonic())

    def try_bulk(self, turn: Turn, cost: int) -> bool:
        """Places for ``cost`` texts, if there is room now and nobody waits longer.

        When there is not, the turn is queued, and its `wake` is called as soon as it should be tried again.
        """
        with self.lock:
            first = not self.turns or self.turns[0] is turn
            if first and self.lanes.room_for_bulk(cost):
                if self.lanes.idle:
                    self.lanes.begin(time.monotonic())
                self.lanes.bulk += cost
                if self.turns and self.turns[0] is turn:
                    self.turns.popleft()
                    self.wake_bulk()
                return True
            if turn not in self.turns:
                self.turns.append(turn)
            return False

    def forget(self, turn: Turn) -> None:
        """The turn is not wanted any more."""
        with self.lock:
            if turn in self.turns:
                self.turns.remove(turn)
                self.wake_bulk()

    def wait_bulk(self, cost: int, gone: Callable[[], bool]) -> bool:
        """Places for ``cost`` texts, as soon as there is room; False when ``gone`` turned true first."""
        woken = threading.Event()
        turn = Turn(woken.set)
        while not self.try_bulk(turn, cost):
            if gone():
                self.forget(turn)
                return False
            woken.wait(timeout=BULK_POLL_SECS)
            woken.clear()
        return True

    def wake_bulk(self) -> None:
        """Under the lock."""
        if self.turns:
            self.turns[0].wake()

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
        self.wake_bulk()
