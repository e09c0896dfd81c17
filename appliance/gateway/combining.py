"""Single texts that are asked for at the same time go to the multiplexer together.

A call costs each process that it passes as much as many rows of a batch do. So while some texts are in flight already,
the next ones of their kind wait until these return, and those that are there by then make one call. Nobody waits for
much longer than a call takes at present: others may wait for a replica that hangs. Few callers have nothing of it:
each of their texts goes alone, and at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from appliance.gateway.refusals import Reason, Refusal

SHORT_WAIT_SECS, LONG_WAIT_SECS = 0.02, 0.5  # the bounds of how long a text waits for the return of others
WAIT_FACTOR = 2.0  # on what a call takes at present, in between
LATEST_SHARE = 0.2  # of the latest call in that mean
MOST_ALONE = 4  # texts of a kind in flight; one that comes then waits for their return
FEWEST_TOGETHER, MOST_TOGETHER = 3, 32  # a common call costs as much as some two of one text
OF_ALL = (Reason.TIMEOUT, Reason.UNAVAILABLE, Reason.NOT_FOUND)  # asked alone, each would only wait once more

Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Waiter(Generic[Answer]):
    """A text that waits. decided: it has its answer, is to lead ``party``, or has to go alone."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.decided = threading.Event()
        self.party: Sequence[Waiter[Answer]] = ()
        self.answer: Answer | None = None
        self.refusal: Refusal | None = None


@dataclass
class TextGroup(Generic[Answer]):
    """The texts that may go together, as far as they are here. in_flight: texts, not calls."""

    in_flight: int = 0
    call_secs: float = 0.0  # of those that returned lately
    waiters: list[Waiter[Answer]] = field(default_factory=list)


class Combiner(Generic[Answer]):
    """Thread-safe: each text comes in the thread of its request, and one of those that wait makes the call of all."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, TextGroup[Answer]] = {}
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
                waiter.decided.wait()
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
            present = self.groups.setdefault(kind, TextGroup())
            if present.in_flight < MOST_ALONE:
                present.in_flight += 1
                return None
            waiter = Waiter[Answer](text)
            present.waiters.append(waiter)
            return waiter

    def has_left(self, kind: Hashable, waiter: Waiter[Answer]) -> bool:
        """Whether it has waited for long enough, and goes alone."""
        present = self.groups[kind]  # as long as it waits there
        if waiter.decided.wait(min(LONG_WAIT_SECS, max(SHORT_WAIT_SECS, WAIT_FACTOR * present.call_secs))):
            return False
        with self.lock:
            if waiter not in present.waiters:  # it goes with others, who have just been chosen
                return False
            present.waiters.remove(waiter)
            present.in_flight += 1
            return True

    def leave(self, kind: Hashable) -> None:
        """A text has returned. Those that wait go when few are left in flight."""
        with self.lock:
            present = self.groups[kind]
            present.in_flight -= 1
            if present.waiters and present.in_flight < MOST_ALONE:
                party, present.waiters = present.waiters[:MOST_TOGETHER], present.waiters[MOST_TOGETHER:]
                present.in_flight += len(party)
                if len(party) >= FEWEST_TOGETHER:
                    party[0].party = party
                for each in party[: 1 if party[0].party else None]:
                    each.decided.set()
            elif not present.in_flight:
                del self.groups[kind]


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
            each.decided.set()
