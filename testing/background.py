"""Threads of a test that work beside it, until its block ends."""

import threading
from collections.abc import Sequence
from typing import Self


class Background:
    """Whose subclass has the threads; they look at ``ended``."""

    threads: Sequence[threading.Thread]

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None = None, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()
