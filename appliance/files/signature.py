"""Whether a file is the one that was read: its signature changes with every replacement and every write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Signature(NamedTuple):
    """inode: another one after a rename over the file. mtime_ns: nanoseconds since 1970. size: bytes."""

    inode: int
    mtime_ns: int
    size: int

    @classmethod
    def of_status(cls, status: os.stat_result) -> Signature:
        return cls(status.st_ino, status.st_mtime_ns, status.st_size)


def signature(path: str | Path) -> Signature | None:
    """None where there is no file. Raises: OSError where that cannot be known."""
    try:
        return Signature.of_status(os.stat(path))
    except FileNotFoundError:
        return None


def signature_or_none(path: str | Path) -> Signature | None:
    """As `signature`, and None also for a file that may not be looked at."""
    try:
        return signature(path)
    except OSError:
        return None
