"""Hearing at once that a file was replaced, from the kernel (inotify): a look at its time stamp is a moment late."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
IN_MOVED_TO = 0x80  # of linux/inotify.h: what a rename ends with
HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it
READ_BYTES = 65536


class FileChange:
    """Of one file, which may not be there yet; its folder has to be. For one thread, and its selector."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError, also where the kernel has no more of these for this user."""
        self.name = os.fsencode(path.name)
        self.descriptor = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise failure(path)
        if LIBC.inotify_add_watch(self.descriptor, os.fsencode(path.parent), IN_MOVED_TO) < 0:
            error = failure(path)
            os.close(self.descriptor)
            raise error

    def fileno(self) -> int:
        """Ready to be read when anything in the folder was replaced."""
        return int(self.descriptor)

    def heard(self) -> bool:
        """Whether the file was replaced since the last time this was asked."""
        found = False
        while events := self.read():
            offset = 0
            while offset < len(events):
                _, _, _, length = HEAD.unpack_from(events, offset)
                offset += HEAD.size + length
                found |= events[offset - length : offset].rstrip(b"\0") == self.name
        return found

    def read(self) -> bytes:
        try:
            return os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.descriptor)


def failure(path: Path) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), str(path))
