"""Leases of cores: each batch of any engine of the appliance takes one, so that together they compute on every core and
never on more threads than there are cores. A lone text takes all of them, where all are free.

A core is a lock on a file, which the kernel gives back when a process dies. A process that is stopped keeps it: whoever
waits for longer than `PATIENCE_SECS` computes without. flock(2) has no time limit, so a thread of its own waits in it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

log = logging.getLogger(__name__)
PATIENCE_SECS = 2.0  # some twenty batches
TURN_SECS = 0.05  # some ten lone texts


def opened(path: Path) -> int:
    """The file descriptor of a core's lock. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def locked_now(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Core:
    """One core as one thread of this process leases it."""

    def __init__(self, path: Path, patience_secs: float | None = None) -> None:
        """patience_secs: how long it is waited for, by default `PATIENCE_SECS`. Raises: OSError."""
        self.patience_secs = PATIENCE_SECS if patience_secs is None else patience_secs
        self.path = path
        self.file = opened(path)
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
                if locked_now(self.file):
                    return True
                if not self.waiting.ident:
                    try:
                        self.waiting.start()
                    except RuntimeError as error:  # no thread can be started; it may be later
                        log.warning("A core is not waited for: %s", error)
                        return False
                self.pending = True
            self.wanted = True
            self.changed.notify_all()
            had = self.changed.wait_for(lambda: not self.pending, self.patience_secs)
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


class AllCores:
    """All cores at once, for one thread of this process at a time.

    turn: what lone texts of several engines wait for, a moment; two at once on all cores take longer than in turn.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises: OSError."""
        self.files = {path: opened(path) for path in paths}
        self.taken = threading.Lock()
        self.turn = Core(paths[0].with_name("lone.lock"), TURN_SECS)

    @contextmanager
    def lease_now(self, besides: Core | None = None) -> Iterator[bool]:
        """Whether all are had while the block runs: all that are not, or none; nobody is waited for.

        besides: a core that the caller has already.
        """
        if not self.taken.acquire(blocking=False):
            yield False
            return
        held: list[int] = []
        try:
            wanted = [file for path, file in self.files.items() if besides is None or path != besides.path]
            held += takewhile(locked_now, wanted)
            yield len(held) == len(wanted)
        finally:
            for file in held:
                fcntl.flock(file, fcntl.LOCK_UN)
            self.taken.release()
