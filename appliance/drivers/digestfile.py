"""SHA-256 of large files, kept in one JSON file, so that each is read once for as long as it does not change.

A file is the one that was read while its inode, size and times are the same. The time of change is the kernel's own:
nobody can set it, as anybody can that of modification. It also changes with a link to the file, as some backups make
them: the file is then read again, and if it is the same, it has been so since before.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from appliance.files.checksum import sha256_of
from appliance.files.replacement import replace_file

MOST_KEPT = 10_000
READING_SECS = 60.0  # that one waits for another process to read


class FileState(NamedTuple):
    """Of a file as it is now. changed_ns: since 1970, of its content, name or rights."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def key(self) -> str:
        return f"{self.content_key}{self.changed_ns}"

    @property
    def content_key(self) -> str:
        """The same while nobody writes to the file, or makes it seem so."""
        return f"{self.device}:{self.inode}:{self.size}:{self.modified_ns}:"


def state_of(path: Path) -> FileState:
    """Raises: OSError."""
    status = path.stat()
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Digest(NamedTuple):
    """sha256: in hex. since_ns: since when the file is known to have this content, as its time of change said then."""

    sha256: str
    since_ns: int


class DigestFile:
    """The digests at one path; several processes may use it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.known: dict[str, Digest] = {}
        self.loaded_ns = 0

    def get(self, state: FileState) -> Digest | None:
        """The digest of a file in that state, as far as somebody has read it."""
        if state.key not in self.known:
            self.load()
        return self.known.get(state.key)

    def load(self) -> None:
        try:
            modified = self.path.stat().st_mtime_ns
            if modified == self.loaded_ns:
                return
            entries = json.loads(self.path.read_text()).items()
            digests = {str(key): Digest(str(sha256), int(since)) for key, (sha256, since) in entries}
        except (OSError, ValueError, TypeError, AttributeError):
            return
        with self.lock:
            self.known = {**digests, **self.known}
            self.loaded_ns = modified

    def read(self, path: Path) -> Digest | None:
        """Read a file as a whole, unless another process has just done so; None when it changed meanwhile.

        Raises: OSError.
        """
        with suppress(Timeout), FileLock(f"{self.path}.lock", timeout=READING_SECS, thread_local=False):
            before = state_of(path)
            if digest := self.get(before):
                return digest
            sha256 = sha256_of(path)
            if state_of(path) == before:
                return self.keep(before, sha256)
        return None

    def keep(self, state: FileState, sha256: str) -> Digest:
        """Under the lock of the file. A link to a file, or other rights of it, leave its content as it was."""
        self.load()
        with self.lock:
            same = {key: each for key, each in self.known.items() if key.startswith(state.content_key)}
            since_ns = min((each.since_ns for each in same.values() if each.sha256 == sha256), default=state.changed_ns)
            digest = Digest(sha256, min(since_ns, state.changed_ns))
            others = {key: each for key, each in self.known.items() if key not in same}
            self.known = {**others, state.key: digest}
            kept = dict(list(self.known.items())[-MOST_KEPT:])
        with suppress(OSError):  # then it is read again after the next start
            replace_file(self.path, json.dumps(kept, indent=1), durable=False)
        return digest
