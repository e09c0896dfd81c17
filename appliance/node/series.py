"""What an instance did in the course of time, as the monitor has written it down."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core import series
from appliance.core.problems import invalid
from appliance.core.series import NAMES, Row
from appliance.drivers.seriesfile import SeriesFile
from appliance.node.context import Node, rfc3339

MOST_POINTS = 300
LONGEST_MINUTES = 31 * 24 * 60


@dataclass(frozen=True)
class SeriesView:
    """rows: the oldest first, ``step_secs`` apart; the last one ends at ``until``, in seconds since 1970."""

    step_secs: int
    until: float
    rows: tuple[Row, ...]

    def column(self, name: str) -> list[float]:
        place = NAMES.index(name)
        return [row[place] for row in self.rows]

    def mapping(self) -> dict[str, Any]:
        """What was not measured is null."""
        columns = {name: [None if math.isnan(each) else each for each in self.column(name)] for name in NAMES}
        first = self.until - self.step_secs * len(self.rows)
        return {"step_secs": self.step_secs, "since": rfc3339(first), "until": rfc3339(self.until), **columns}


def show(node: Node, name: str, minutes: int) -> SeriesView:
    """The last so many minutes. Raises: Problem not_found; invalid."""
    node.state.read().get(name)
    if not 1 <= minutes <= LONGEST_MINUTES:
        raise invalid(f"Query parameter minutes must be 1 to {LONGEST_MINUTES}, not {minutes}")
    ring = series.ring_for(minutes * 60)
    until = time.time() // ring.secs * ring.secs
    rows = file_of(node, name).read(ring, until - minutes * 60, until)
    each = -(-len(rows) // MOST_POINTS)
    # So that the means begin with whole ones, as they will be a moment later.
    rows = rows[len(rows) % each :] if each > 1 else rows
    return SeriesView(ring.secs * max(1, each), until, tuple(series.thinned(rows, max(1, len(rows) // max(1, each)))))


def newest(node: Node, name: str) -> dict[str, float | None]:
    """The last row, if it is of this minute; None for what was not measured."""
    row = file_of(node, name).newest(time.time())
    return {each: None if math.isnan(value) else value for each, value in zip(NAMES, row, strict=True)}


def file_of(node: Node, name: str) -> SeriesFile:
    return SeriesFile(Path(node.layout.series) / name)
