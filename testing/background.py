"""Threads of a test that work beside it, until its block ends."""

import threading
from collections.abc import Sequence
from typing import Self

PAUSE_SECS = 0.02  # some callers together always have a call under way, and leave the cores to the tests beside them


class Background:
    """Whose subclass has the threads; they look at ``ended``, or pause until it is set."""

    threads: Sequence[threading.Thread]

    def __init__(self, pause_secs: float = PAUSE_SECS) -> None:
        self.ended = threading.Event()
        self.pause_secs = pause_secs

    def paused(self) -> bool:
        """Between two calls of a thread: false when it is to end."""
        return not self.ended.wait(self.pause_secs)

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None = None, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()
