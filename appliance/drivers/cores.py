"""Leases of cores: each batch of any engine of the appliance takes one, so that together they compute on every core and
never on more threads than there are cores.

A core is a lock on a file, which the kernel gives back when a process dies. A process that is stopped keeps it: whoever
waits for longer than `PATIENCE_SECS` computes without. flock(2) has no time limit, so a thread of its own waits in it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_SECS = 2.0  # some twenty batches


class Core:
    """One core as one thread of this process leases it."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.changed = threading.Condition()
        self.pending = False  # the thread waits in flock
        self.wanted = False  # and somebody for the thread
        self.waiting = threading.Thread(target=self.wait, name="core", daemon=True)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Whether the core was had while the block ran; without it the block runs all the same."""
        held = self.acquire()
        try:
            yield held
        finally:
            if held:
                fcntl.flock(self.file, fcntl.LOCK_UN)

    def acquire(self) -> bool:
        with self.changed:
            if not self.pending:
                try:
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    self.pending = True
                    if not self.waiting.ident:
                        self.waiting.start()
            self.wanted = True
            self.changed.notify_all()
            had = self.changed.wait_for(lambda: not self.pending, PATIENCE_SECS)
            self.wanted = False
            return had

    def wait(self) -> None:
        """The thread: take the lock when it is pending, for whoever still wants it."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pending)
            fcntl.flock(self.file, fcntl.LOCK_EX)
            with self.changed:
                self.pending = False
                if not self.wanted:
                    fcntl.flock(self.file, fcntl.LOCK_UN)
                self.changed.notify_all()
