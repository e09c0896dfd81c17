"""Who waits for room, in the order in which they came."""

from __future__ import annotations

import threading

# Whoever waits asks again within a second, or some where control is slow.
ABSENT_SECS, GONE_SECS = 5.0, 30.0


class WaitingLine:
    """The instances that wait for room, in the order in which they came; thread-safe. now: of time.monotonic.

    Who waits asks again and again. One that has not asked for `ABSENT_SECS` is passed by, and gets its place back when
    it asks within `GONE_SECS`.
    """

    def __init__(self) -> None:
        self.asked: dict[str, float] = {}  # instance -> when it asked last
        self.lock = threading.Lock()

    def note(self, name: str, now: float) -> None:
        """An instance asks for room."""
        with self.lock:
            self.asked = {other: at for other, at in self.asked.items() if now - at < GONE_SECS}
            self.asked[name] = now

    def leave(self, name: str) -> None:
        """It has room, or was refused for good."""
        with self.lock:
            self.asked.pop(name, None)

    def ahead_of(self, name: str, now: float) -> tuple[str, ...]:
        """Those who came before one that waits and still ask."""
        with self.lock:
            names = list(self.asked)
            before = names[: names.index(name)] if name in self.asked else ()
            return tuple(each for each in before if now - self.asked[each] < ABSENT_SECS)
