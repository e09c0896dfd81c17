"""Streams are bounded by progress: a call whose backend owes an answer and sends nothing for too long is ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_SECS = 0.05


class Progress:
    """What one stream has sent and received, and how to end it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel
        self.owed = 0
        self.moved_at = time.monotonic()
        self.stalled = False

    def sent(self) -> None:
        self.owed += 1
        self.moved_at = time.monotonic()

    def received(self) -> None:
        self.owed -= 1
        self.moved_at = time.monotonic()


class Watchdog:
    """One thread that ends stalled streams. limit_secs 0: none are."""

    def __init__(self, limit_secs: float) -> None:
        self.limit_secs = limit_secs
        self.watched: set[Progress] = set()
        self.lock = threading.Lock()
        if limit_secs:
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    @contextmanager
    def over(self, progress: Progress) -> Iterator[None]:
        with self.lock:
            self.watched.add(progress)
        try:
            yield
        finally:
            with self.lock:
                self.watched.discard(progress)

    def watch(self) -> None:
        while True:
            time.sleep(TICK_SECS)
            with self.lock:
                watched = list(self.watched)
            latest = time.monotonic() - self.limit_secs
            for progress in watched:
                if progress.owed > 0 and progress.moved_at < latest and not progress.stalled:
                    progress.stalled = True
                    progress.cancel()
