"""When instances were used last: a file of each multiplexer process, for those who put idle ones to sleep.

Only instances that may be put to sleep for want of calls, or of room, are in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from appliance.files.replacement import replace_file

FRESH_SECS = 15.0  # what an older file says of calls in work is over: its process has ended, or hangs


class LastUse(NamedTuple):
    """Of an instance. last: seconds since 1970. busy: calls of it are in work, or wait."""

    last: float
    busy: bool


class ActivityFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, uses: Mapping[str, LastUse]) -> None:
        """Raises: OSError."""
        self.path.parent.mkdir(exist_ok=True)
        replace_file(self.path, json.dumps({"at": time.time(), "uses": uses}), durable=False)


def uses(folder: Path) -> dict[str, LastUse]:
    """Of each instance by all multiplexer processes together; one that nobody has used is not there."""
    merged: dict[str, LastUse] = {}
    for name, use in (each for path in folder.glob("*.json") for each in read(path)):
        other = merged.get(name, use)
        merged[name] = LastUse(max(use.last, other.last), use.busy or other.busy)
    return merged


def read(path: Path) -> Iterable[tuple[str, LastUse]]:
    try:
        written = json.loads(path.read_text())
        fresh = abs(time.time() - written["at"]) < FRESH_SECS
        return [(name, LastUse(float(last), bool(busy) and fresh)) for name, (last, busy) in written["uses"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it is written again in a moment
        return []
