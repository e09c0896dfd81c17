"""A program tells in a file that it goes on, also while nobody could ask it: all of its threads may have much to do."""

from __future__ import annotations

import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BEAT_SECS = 1.0
BEAT = struct.Struct("=qd")  # the process, and when: of the clock that all processes of a machine share


class LastBeat(NamedTuple):
    """at: by the clock of `time.monotonic`."""

    pid: int
    at: float


class Heartbeat:
    """Of a process. pid: another one that goes on as long as this one does.

    A thread of its own writes it down: a disk that stalls or refuses keeps nobody from his work.
    """

    def __init__(self, path: Path, pid: int | None = None) -> None:
        self.path = path
        self.pid = pid or os.getpid()
        self.at = self.written_at = float("-inf")
        self.thread: threading.Thread | None = None

    def beat_now(self) -> bool:
        """Without the thread: whether the file takes it."""
        self.at = time.monotonic()
        return self.write()

    def beat(self) -> None:
        """By one thread, as often as it likes."""
        self.at = time.monotonic()
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
            self.thread.start()

    def run(self) -> None:
        while True:
            self.write()
            time.sleep(BEAT_SECS)

    def write(self) -> bool:
        """Whether the last beat is in the file. Not through a temporary file: it is one write of 16 bytes, and nobody
        needs it after a crash."""
        at = self.at
        if at != self.written_at:
            with suppress(OSError):
                file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(file, BEAT.pack(self.pid, at), 0)
                    self.written_at = at
                finally:
                    os.close(file)
        return at == self.written_at


def last_beat(path: Path) -> LastBeat | None:
    """None where there has been none since the machine was started."""
    try:
        pid, at = BEAT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return LastBeat(pid, at) if at <= time.monotonic() else None
