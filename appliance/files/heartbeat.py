"""A program tells in a file that it goes on, also while nobody could ask it: all of its threads may have much to do."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path

BEAT_SECS = 0.5
BEAT = struct.Struct("=qd")  # the process, and when: of the clock that all processes of a machine share


class Heartbeat:
    """Of a process. A disk that refuses keeps nobody from his work."""

    def __init__(self, path: Path, pid: int | None = None) -> None:
        """pid: the process that goes on, left out: this one."""
        self.pid = pid or os.getpid()
        self.at = float("-inf")
        self.file: int | None = None
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        self.beat()

    def beat(self) -> None:
        """Once in BEAT_SECS, however often it is called. Not through a temporary file: it is one write of 16 bytes, and
        nobody needs it after a crash."""
        now = time.monotonic()
        if self.file is not None and now - self.at >= BEAT_SECS:
            self.at = now
            with suppress(OSError):
                os.pwrite(self.file, BEAT.pack(self.pid, now), 0)


def silent_secs(path: Path) -> float | None:
    """For how long the last process that said so has not said that it goes on; None where it has ended, or none has."""
    try:
        pid, at = BEAT.unpack(path.read_bytes())
        os.kill(pid, 0)
    except (OSError, struct.error):
        return None
    silent = time.monotonic() - at
    return silent if silent >= 0 else None  # or it is of a time before the machine was started again
