"""Log files of the programs, as supervisor writes and rotates them (`x.log`, older parts `x.log.1`, `x.log.2`, ...)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)
KEPT_ASIDE = 20  # logs of deleted instances


@dataclass(frozen=True)
class LogWindow:
    """The lines from number ``start`` to before number ``end``, of a log with ``total`` lines. They are read as they
    are taken, as a log may be larger than what a process should keep; the files are closed with the last one."""

    lines: Iterator[str]
    start: int
    end: int
    total: int


def parts(path: Path) -> list[Path]:
    """The parts of a rotated log that exist, oldest first."""
    rotated = [path.with_name(f"{path.name}.{number}") for number in range(9, 0, -1)]
    return [part for part in (*rotated, path) if part.exists()]


def set_aside(path: Path, folder: Path) -> None:
    """Move the newest part of a log to ``folder``, which holds the newest KEPT_ASIDE, and delete its older parts."""
    try:
        folder.mkdir(exist_ok=True)
        if path.exists():
            os.replace(path, folder / path.name)
            os.utime(folder / path.name)
        for part in parts(path):
            part.unlink(missing_ok=True)
        logs = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in logs[:-KEPT_ASIDE]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("The log %s could not be set aside: %s", path, error)


def window(path: Path, start: int | None, end: int | None) -> LogWindow:
    """A Python slice over all lines of the log: negative numbers count from the end."""
    files = opened(path)  # once: what is rotated away between counting and reading is still there
    total = sum(1 for _ in chain(*files))
    first, last, _ = slice(start, end).indices(total)
    return LogWindow(lines_of(files, first, max(first, last)), first, last, total)


def opened(path: Path) -> list[TextIO]:
    files: list[TextIO] = []
    for part in parts(path):
        try:
            files.append(part.open(encoding="utf-8", errors="replace", newline="\n"))
        except FileNotFoundError:
            continue  # it was rotated away meanwhile
    return files


def lines_of(files: list[TextIO], first: int, last: int) -> Iterator[str]:
    with ExitStack() as closing:
        for file in files:
            closing.enter_context(file).seek(0)
        for line in islice(chain(*files), first, last):
            yield line.rstrip("\r\n")


def tail(path: Path, count: int, longest: int = 64 * 1024) -> list[str]:
    """The last ``count`` lines of the newest part, reading at most ``longest`` bytes; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - longest))
            text = file.read(longest).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        log.error("The log %s could not be read: %s", path, error)
        return []
    newest = text.removesuffix("\n").split("\n") if text else []
    return [line.rstrip("\r") for line in newest[max(0, len(newest) - count) :]]
