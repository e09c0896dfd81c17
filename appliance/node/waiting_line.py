"""Who waits for room, in the order in which they came."""

from __future__ import annotations

import threading
from typing import NamedTuple

ABSENT_SECS = 5.0  # whoever waits asks again within a second, or some where control is slow


class WaitsForRoom(NamedTuple):
    """Since when an instance waits, and when it asked last; of time.monotonic."""

    since: float
    asked: float


class WaitingLine:
    """The instances that wait for room; thread-safe. now: of time.monotonic, which all processes of a machine share.

    Who waits asks again and again. One that has not asked for `ABSENT_SECS` is passed by.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, WaitsForRoom] = {}
        self.lock = threading.Lock()

    def note(self, name: str, since: float | None, now: float) -> None:
        """An instance asks for room. since: when its first call came; None: where it was not here, now."""
        with self.lock:
            self.waiting = {other: each for other, each in self.waiting.items() if now - each.asked < ABSENT_SECS}
            known = self.waiting.get(name, WaitsForRoom(now, now)).since
            self.waiting[name] = WaitsForRoom(known if since is None else min(known, since), now)

    def leave(self, name: str) -> None:
        """It has room, or was refused for good."""
        with self.lock:
            self.waiting.pop(name, None)

    def ahead_of(self, name: str, now: float) -> tuple[str, ...]:
        """Those who came before one that waits and still ask, in their order."""
        with self.lock:
            if name not in self.waiting:
                return ()
            own = self.waiting[name].since
            before = [
                other for other, each in self.waiting.items() if each.since < own and now - each.asked < ABSENT_SECS
            ]
            return tuple(sorted(before, key=lambda other: self.waiting[other].since))
