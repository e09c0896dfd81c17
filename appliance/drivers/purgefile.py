"""Which cached embeddings are not used any more, in one JSON file that all processes follow.

An entry may be on its way to the store while it is purged there, and the store may be away. So each process compares
the time of what it finds with this list. A purge stays on it until the store has done it, and for an hour from then on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from appliance.core.cachekey import Purge
from appliance.files.replacement import replace_file
from appliance.files.signature import Signature, signature_or_none

KEPT_MS = 3_600_000
LOCK_SECS = 5.0


class PurgeFile:
    """Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.read_at: Signature | None = None
        self.purges: dict[Purge, bool] = {}  # whether the store has done it

    def current(self) -> tuple[Purge, ...]:
        """All of them; where nothing has changed, a look at the file's times (3 us)."""
        self.follow()
        return tuple(self.purges)

    def undone(self) -> list[Purge]:
        """Those that the store has not done yet."""
        self.follow()
        return [purge for purge, done in self.purges.items() if not done]

    def follow(self) -> None:
        present = signature_or_none(self.path)
        if present != self.read_at:
            with self.lock, suppress(OSError):  # what cannot be read now still holds, and is read at the next look
                purges = self.read()
                self.read_at, self.purges = present, purges

    def read(self) -> dict[Purge, bool]:
        """Raises: OSError for a file that is there and cannot be read: to forget its purges would be a lie."""
        try:
            entries = json.loads(self.path.read_text())
            return {Purge(str(of), int(since), int(until), str(why)): done for of, since, until, why, done in entries}
        except (FileNotFoundError, ValueError, TypeError):
            return {}

    def add(self, purge: Purge) -> None:
        """From now on nobody uses what it names. Raises: OSError, also where another process keeps the file."""
        with self.changing() as purges:
            purges[purge] = False

    def mark_done(self, purge: Purge) -> None:
        """The store has deleted what the purge names. Raises: OSError."""
        with self.changing() as purges:
            purges[purge] = True

    @contextmanager
    def changing(self) -> Iterator[dict[Purge, bool]]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(f"{self.path}.lock", timeout=LOCK_SECS, thread_local=False):
                purges = self.read()
                yield purges
                since_ms = max((each.until_ms for each in purges), default=0) - KEPT_MS
                kept = [[*each, done] for each, done in purges.items() if not done or each.until_ms > since_ms]
                replace_file(self.path, json.dumps(kept), durable=True)
        except Timeout:
            raise OSError(f"{self.path} is in use for over {LOCK_SECS:g} s") from None
