"""Log files of the programs, as supervisor writes and rotates them (`x.log`, older parts `x.log.1`, `x.log.2`, ...)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

log = logging.getLogger(__name__)
KEPT_ASIDE = 20  # logs of deleted instances


def parts(path: Path) -> list[Path]:
    """The parts of a rotated log that exist, oldest first."""
    rotated = [path.with_name(f"{path.name}.{number}") for number in range(9, 0, -1)]
    return [part for part in (*rotated, path) if part.exists()]


def set_aside(path: Path, folder: Path) -> None:
    """Keep the newest part of a log in ``folder``, where the newest KEPT_ASIDE are, and remove its older parts."""
    try:
        folder.mkdir(exist_ok=True)
        if path.exists():
            os.replace(path, folder / path.name)
            os.utime(folder / path.name)
        for part in parts(path):
            part.unlink(missing_ok=True)
        kept = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in kept[:-KEPT_ASIDE]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("The log %s could not be set aside: %s", path, error)


def lines(path: Path) -> Iterator[str]:
    for part in parts(path):
        try:
            with part.open(encoding="utf-8", errors="replace", newline="\n") as file:
                for line in file:
                    yield line.rstrip("\r\n")
        except FileNotFoundError:
            continue  # rotated away between the look and the reading


def window(path: Path, start: int | None, end: int | None) -> tuple[list[str], int, int, int]:
    """(lines, start, end, total): a Python slice over all lines of the log; negatives count from the end."""
    total = sum(1 for _ in lines(path))
    first, last, _ = slice(start, end).indices(total)
    return list(islice(lines(path), first, max(first, last))), first, last, total


def tail(path: Path, count: int, longest: int = 64 * 1024) -> list[str]:
    """The last ``count`` lines of the newest part, reading at most ``longest`` bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - longest))
        text = file.read().decode("utf-8", errors="replace")
    found = text.removesuffix("\n").split("\n") if text else []
    return [line.rstrip("\r") for line in found[max(0, len(found) - count) :]]
