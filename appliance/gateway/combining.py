"""Single texts that are asked for at the same time go to the multiplexer together.

A call costs each process that it passes as much as many rows of a batch do. So while some texts are in flight already,
the next ones of their kind wait until these return, and those that are there by then make one call. How long that may
take depends on what a call takes at present: others may wait for a replica that hangs. Few callers have nothing of it:
each of their texts goes alone, and at once.

Where there are many, all go together: those whose answers are out ask again a moment later, and the first of them waits
until as many are there as before, or nobody else comes. If it went alone, all others would wait for its return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from appliance.gateway.refusals import Reason, Refusal

SHORT_WAIT_SECS, LONG_WAIT_SECS = 0.02, 0.5  # the bounds of how long a text waits for the return of others
WAIT_FACTOR = 2.0  # on what a call takes at present, in between
LATEST_SHARE = 0.2  # of the latest call in that mean
GAP_SECS = 0.005  # when no other text of many has come or returned for so long, those that are there go
MOST_ALONE = 4  # texts of a kind in flight; one that comes then waits for their return
FEWEST_TOGETHER, MOST_TOGETHER = 3, 32  # a common call costs as much as some two of one text
MOST_REMEMBERED = 64  # kinds that many asked for, and nobody at the moment
OF_ALL = (Reason.TIMEOUT, Reason.UNAVAILABLE, Reason.NOT_FOUND)  # asked alone, each would only wait once more

Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Waiter(Generic[Answer]):
    """A text that waits until it is decided: it has its answer, is to lead ``party``, or has to go alone."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_decided = False
        self.decisions: SimpleQueue[None] = SimpleQueue()  # an Event takes five times as long
        self.party: Sequence[Waiter[Answer]] = ()
        self.answer: Answer | None = None
        self.refusal: Refusal | None = None

    def decide(self) -> None:
        self.decisions.put(None)

    def wait(self, secs: float | None = None) -> bool:
        """Whether it is decided, before that many seconds are over."""
        if not self.is_decided:
            with suppress(Empty):
                self.decisions.get(timeout=secs)
                self.is_decided = True
        return self.is_decided


@dataclass
class TextGroup(Generic[Answer]):
    """The texts that may go together, as far as they are here. in_flight: texts, not calls.

    before, most: how many were here at once until the latest common call began, and since then.
    came_at, returned_at: by the monotonic clock, the latest of each.
    """

    before: int = 0
    most: int = 0
    came_at: float = 0.0
    returned_at: float = 0.0
    in_flight: int = 0
    call_secs: float = 0.0  # of those that returned lately
    waiters: list[Waiter[Answer]] = field(default_factory=list)

    @property
    def are_many(self) -> bool:
        return self.before > MOST_ALONE

    @property
    def are_back(self) -> bool:
        return self.in_flight < MOST_ALONE

    @property
    def moved_at(self) -> float:
        return max(self.came_at, self.returned_at)

    @property
    def gather_secs(self) -> float:
        """How long the first of many may wait for the others to come: they have nothing of it if that takes longer."""
        return max(GAP_SECS, self.call_secs)

    def came(self) -> None:
        self.came_at = time.monotonic()
        self.most = max(self.most, self.in_flight + len(self.waiters))

    def send(self) -> None:
        """Those that wait go: as common calls, each made by its first text, or alone where they are few."""
        waiters, self.waiters = self.waiters, []
        self.in_flight += len(waiters)
        self.before, self.most = self.most, self.in_flight
        for begin in range(0, len(waiters), MOST_TOGETHER):
            party = waiters[begin : begin + MOST_TOGETHER]
            if len(party) >= FEWEST_TOGETHER:
                party[0].party = party
            for each in party[:1] if party[0].party else party:
                each.decide()


class Combiner(Generic[Answer]):
    """Thread-safe: each text comes in the thread of its request, and one of those that wait makes the call of all."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, TextGroup[Answer]] = {}
        self.remembered: dict[Hashable, TextGroup[Answer]] = {}  # those of many, of whom nobody is here
        self.lock = threading.Lock()

    def ask(
        self,
        kind: Hashable,
        text: str,
        alone: Callable[[], Answer],
        together: Callable[[Sequence[str]], Sequence[Answer | None]],
    ) -> Answer:
        """The answer to ``text``. kind: texts of the same one may be one call.

        alone() asks for this text, together(texts) for all of these, in order. A text that has no answer then, or was
        refused with all, is asked for alone: it gets its own answer, or its own refusal. Raises: Refusal.
        """
        waiter = self.enter(kind, text)
        try:
            if waiter and not self.has_left(kind, waiter):
                waiter.wait()
                if waiter.party:
                    self.timed(kind, lambda: answer(waiter.party, together))
                if waiter.refusal:
                    raise waiter.refusal
                if waiter.answer is not None:
                    return waiter.answer
            return self.timed(kind, alone)
        finally:
            self.leave(kind)

    def timed(self, kind: Hashable, call: Callable[[], Result]) -> Result:
        began = time.monotonic()
        try:
            return call()
        finally:
            group = self.groups[kind]
            group.call_secs += LATEST_SHARE * (time.monotonic() - began - group.call_secs)

    def enter(self, kind: Hashable, text: str) -> Waiter[Answer] | None:
        """None for a text that goes alone."""
        with self.lock:
            present = self.groups.get(kind)
            if present is None:
                known = self.remembered.pop(kind, None)
                present = self.groups[kind] = known or TextGroup()
            if present.are_back and not present.are_many:
                present.in_flight += 1
                present.came()
                return None
            waiter: Waiter[Answer] = Waiter(text)
            present.waiters.append(waiter)
            present.came()
            if present.are_many and len(present.waiters) >= min(present.before, MOST_TOGETHER):
                present.send()
            return waiter

    def has_left(self, kind: Hashable, waiter: Waiter[Answer]) -> bool:
        """Whether it has waited for long enough, and goes alone."""
        present = self.groups[kind]  # as long as it waits there
        came_at = time.monotonic()
        longest = min(LONG_WAIT_SECS, max(SHORT_WAIT_SECS, WAIT_FACTOR * present.call_secs))
        while not waiter.wait(next_look(present, waiter, longest)):
            with self.lock:
                if waiter not in present.waiters:  # it goes with others, who have just been chosen
                    return False
                has_waited = time.monotonic() - came_at >= longest
                if present.are_many:
                    if waiter is present.waiters[0] and (has_waited or all_have_come(present, came_at)):
                        present.send()
                elif has_waited:
                    present.waiters.remove(waiter)
                    present.in_flight += 1
                    return True
        return False

    def leave(self, kind: Hashable) -> None:
        """A text has returned. Those that wait go when few are left in flight."""
        with self.lock:
            present = self.groups[kind]
            present.in_flight -= 1
            present.returned_at = time.monotonic()
            if present.waiters:
                if present.are_back and not present.are_many:
                    present.send()
            elif not present.in_flight:
                del self.groups[kind]
                self.remember(kind, present)

    def remember(self, kind: Hashable, present: TextGroup[Answer]) -> None:
        if present.are_many:
            if len(self.remembered) == MOST_REMEMBERED:
                del self.remembered[next(iter(self.remembered))]
            self.remembered[kind] = present


def next_look(present: TextGroup[Answer], waiter: Waiter[Answer], longest: float) -> float:
    """Seconds. The first of many looks whether others still come."""
    if not (present.are_many and present.waiters[:1] == [waiter]):
        return longest
    return max(GAP_SECS / 10, present.moved_at + GAP_SECS - time.monotonic()) if present.are_back else GAP_SECS


def all_have_come(present: TextGroup[Answer], came_at: float) -> bool:
    """Whether the first of many, which came at ``came_at``, need not wait for others."""
    now = time.monotonic()
    has_gathered = now - max(came_at, present.returned_at) >= present.gather_secs
    return present.are_back and (has_gathered or now - present.moved_at >= GAP_SECS)


def answer(party: Sequence[Waiter[Answer]], together: Callable[[Sequence[str]], Sequence[Answer | None]]) -> None:
    """Give all waiters their answer; none to those who have to ask alone."""
    try:
        answers = together([each.text for each in party])
        for each, its_answer in zip(party, answers, strict=True):
            each.answer = its_answer
    except Refusal as refusal:
        for each in party if refusal.reason in OF_ALL else ():
            each.refusal = refusal
    finally:
        for each in party:
            each.decide()
