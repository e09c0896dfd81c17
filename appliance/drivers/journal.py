"""The journal of events: one JSON object a line, in a ring of two files of bounded size.

An event has ``seq`` (rises by one), ``time`` (RFC 3339 UTC), ``event`` (a word), ``instance`` or null, ``message``.
An event that is too long for a line is cut: a message loses its end, and a list (the last lines of a log) its
beginning. Recording an event never fails: a full disk must not stop the operation that records it.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
LONGEST = 8000  # characters of a message, and of each text in the details
LONGEST_LINE = 65536  # bytes
WHOLE = ("seq", "time", "event", "instance")  # never cut
BLOCK = 65536  # bytes that the search for the last event of a file reads at once, from the end
MOST_UNWRITTEN = 1000  # events that wait in memory while the disk is full
RING_BYTES = 2 * 1024 * 1024  # per file; the older of two is dropped
Word = TypeVar("Word", bound=str)


# (event, instance, details) of each event
Count = Callable[[str, str | None, dict[str, Any]], None]


def uncounted(event: str, instance: str | None, details: dict[str, Any]) -> None:
    pass


class Journal(Generic[Word]):
    """The event ring at one path; several processes may use it. Word: the names of its events."""

    def __init__(self, path: str | Path, now: Callable[[], str], count: Count = uncounted) -> None:
        self.count = count
        self.path = Path(path)
        self.older = self.path.with_suffix(".older.jsonl")
        self.now = now
        self.unwritten: deque[dict[str, Any]] = deque(maxlen=MOST_UNWRITTEN)

    def record(self, event: Word, instance: str | None, message: str, **details: Any) -> None:
        entry = {"time": self.now(), "event": event, "instance": instance, "message": message[:LONGEST], **details}
        self.count(event, instance, details)
        log.info("%s", message, extra={"event": event, "instance": instance})
        self.unwritten.append(entry)
        self.write()

    def write(self) -> None:
        """Append the recorded events. Those that cannot be written wait for the next call."""
        if not self.unwritten:
            return
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=5):
                while self.unwritten:
                    entry = self.unwritten[0]
                    self.append(entry)
                    with suppress(ValueError):  # where there are many, one that came meanwhile has pushed it out
                        self.unwritten.remove(entry)
        except (OSError, Timeout) as error:
            log.error("Cannot write the event journal %s: %s", self.path, error)

    def append(self, entry: dict[str, Any]) -> None:
        last = last_line(self.path) or last_line(self.older)
        line = line_of({"seq": (last["seq"] if last else 0) + 1, **entry})
        if self.path.exists() and self.path.stat().st_size + len(line) > RING_BYTES:
            os.replace(self.path, self.older)
        with self.path.open("ab") as file:
            file.write(b"" if ends_clean(self.path) else b"\n")  # a crash may have cut the last line off
            file.write(line.encode())

    def mark(self) -> tuple[int, int] | None:
        """Changes with each event; None while there is no event."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size

    def since(self, seq: int) -> list[dict[str, Any]]:
        """The events with a higher ``seq``, oldest first. Raises: Timeout where another has the files for too long."""
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=5):  # so that the files are not exchanged meanwhile
                return self.read_since(seq)
        except Timeout:
            raise
        except OSError:  # a disk that takes no lock takes no exchange either
            return self.read_since(seq)

    def read_since(self, seq: int) -> list[dict[str, Any]]:
        return [entry for path in (self.older, self.path) for entry in entries(path) if entry["seq"] > seq]


@lru_cache(maxsize=2)
def recent(journal: Journal[Any], mark: tuple[int, int] | None) -> Sequence[dict[str, Any]]:
    """All its events, the oldest first, as they were at this mark: read again only when it has grown, for those who
    look at it all the time. It has up to 4 MB."""
    return journal.since(0)


def after(events: Sequence[dict[str, Any]], seq: int) -> Sequence[dict[str, Any]]:
    """Of all events of a journal those with a higher number; all of them where it was begun anew since."""
    if events and events[-1]["seq"] < seq:
        return events
    return events[bisect_right(events, seq, key=itemgetter("seq")) :]


def line_of(entry: dict[str, Any]) -> str:
    for halved in range(LONGEST.bit_length()):
        longest = LONGEST >> halved
        shortened = {key: value if key in WHOLE else cut(value, longest) for key, value in entry.items()}
        if len(line := json.dumps(shortened) + "\n") <= LONGEST_LINE:
            break
    return line


def cut(value: Any, longest: int) -> Any:
    """A text of at most ``longest`` characters; a list of at most as many such texts."""
    if isinstance(value, str):
        return value[:longest]
    return [cut(each, longest) for each in value[-longest:]] if isinstance(value, list) else value


def entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if entry := event_in(line):
                yield entry


def event_in(line: str | bytes) -> dict[str, Any] | None:
    """The event in a line; None for a line that a crash has cut off."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("seq"), int) else None


def ends_clean(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def last_line(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        rest = b""
        while begin:
            size = min(BLOCK, begin)
            begin = file.seek(begin - size)
            first, *lines = (file.read(size) + rest).split(b"\n")
            if entry := next((entry for line in reversed(lines) if (entry := event_in(line))), None):
                return entry
            rest = first + b"\n" if lines else first
    return event_in(rest)
