"""When a store that failed is asked again: not at once, by nobody; after a pause, by one call."""

from __future__ import annotations

PAUSE_SECS = 1.0


class Breaker:
    """Time is in seconds of any clock that only rises. Not thread-safe: whoever shares it has a lock."""

    def __init__(self, pause_secs: float = PAUSE_SECS) -> None:
        self.pause_secs = pause_secs
        self.open_until: float | None = None  # None: the last call succeeded
        self.words = ""

    def admits(self, now: float) -> bool:
        """Whether a call may be tried. After a pause one may, and until that one ends, none else for another pause."""
        if self.open_until is None:
            return True
        if now < self.open_until:
            return False
        self.open_until = now + self.pause_secs
        return True

    def succeeded(self) -> None:
        self.open_until = None

    def failed(self, now: float, words: str) -> None:
        """words: of the failure, for those that are refused because of it."""
        self.open_until = now + self.pause_secs
        self.words = words
