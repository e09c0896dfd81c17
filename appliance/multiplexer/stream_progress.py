"""Streams are bounded by progress, not by time.

A call whose replica owes an answer, and sends nothing for too long, is ended. A stream whose caller does not read its
answers releases its permits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_SECS = 0.05
UNREAD_SECS = 1.0  # how far a caller may fall behind its replica before its permits go to others


class StreamProgress:
    """What one stream has sent and received, and how to end it.

    lag_secs: for how long answers have waited for the caller, less how long the caller has waited for answers since.
    """

    def __init__(self, cancel: Callable[[], object], on_lag: Callable[[], object]) -> None:
        self.cancel = cancel
        self.on_lag = on_lag  # called again and again while the caller is behind
        self.owed = 0
        self.moved_at = time.monotonic()
        self.stalled = False
        self.lag_secs = 0.0
        self.handed_over_at: float | None = None  # when the caller was offered the answer that it has not taken yet
        self.waits_since = self.moved_at  # for the replica's next answer

    def count_sent(self) -> None:
        """Of a message, or of the end of them: what is owed for that is the end of the answers."""
        self.owed += 1
        self.moved_at = time.monotonic()

    def count_received(self) -> None:
        self.owed -= 1
        self.moved_at = time.monotonic()
        self.lag_secs = max(0.0, self.lag_secs - (self.moved_at - self.waits_since))

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """While an answer is offered to the caller. The replica is not to blame for this time."""
        self.handed_over_at = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = self.moved_at = time.monotonic()
            self.lag_secs += self.moved_at - self.handed_over_at
            self.handed_over_at = None

    def is_behind(self, now: float) -> bool:
        handed_over_at = self.handed_over_at
        return self.lag_secs + (now - handed_over_at if handed_over_at else 0) > UNREAD_SECS

    def is_stalled(self, latest: float) -> bool:
        """Whether the replica owes an answer, or their end, and nothing has moved since ``latest``."""
        return self.owed > 0 and not self.handed_over_at and self.moved_at < latest and not self.stalled


class Watchdog:
    """One thread that ends stalled streams. limit_secs 0: it ends none."""

    def __init__(self, limit_secs: float) -> None:
        self.limit_secs = limit_secs
        self.watched: set[StreamProgress] = set()
        self.is_needed = threading.Event()  # nobody's streams cost nothing
        self.lock = threading.Lock()
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watching(self, progress: StreamProgress) -> Iterator[None]:
        with self.lock:
            self.watched.add(progress)
            self.is_needed.set()
        try:
            yield
        finally:
            with self.lock:
                self.watched.discard(progress)

    def watch(self) -> None:
        while self.is_needed.wait():
            time.sleep(TICK_SECS)
            with self.lock:
                watched = list(self.watched)
                if not watched:
                    self.is_needed.clear()
            now = time.monotonic()
            for progress in watched:
                if progress.is_behind(now):
                    progress.on_lag()
                if self.limit_secs and progress.is_stalled(now - self.limit_secs):
                    progress.stalled = True
                    progress.cancel()
