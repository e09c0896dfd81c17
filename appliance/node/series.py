"""What an instance did in the course of time, as the monitor wrote it down, or as an operator's Prometheus has it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.core import series
from appliance.core.problems import Problem, invalid
from appliance.core.series import NAMES, Row
from appliance.drivers.promql import Prometheus
from appliance.drivers.seriesfile import SeriesFile
from appliance.node.context import Node, rfc3339

MOST_POINTS = 300
LONGEST_MINUTES = 31 * 24 * 60
OWN = "monitor"
CALLS = "sum(rate(tei_manager_grpc_requests_total{of}[{span}s]))"
# What a Prometheus has of an instance; what is not here only the monitor knows. {of}: the labels; {span}: seconds.
QUERIES = {
    "texts": "sum(rate(tei_manager_texts_total{of}[{span}s]))",
    "calls": CALLS,
    "errors": "sum(rate(tei_manager_grpc_requests_total{wrong}[{span}s])) or 0 * {calls}",
    "hits": "sum(rate(tei_manager_cache_lookups_total{hit}[{span}s])) or 0 * {calls}",
    "p50_ms": "1000 * histogram_quantile(0.5, sum by (le) (rate({durations}{of}[{span}s])))",
    "p95_ms": "1000 * histogram_quantile(0.95, sum by (le) (rate({durations}{of}[{span}s])))",
    "queue": "sum(tei_manager_queue_size{of})",
    "ready": "sum(tei_manager_instance_up{of})",
}
DURATIONS = "tei_manager_grpc_request_duration_seconds_bucket"
WRONG = 'code!~"OK|CANCELLED"'
SHORTEST_RATE_SECS = 60  # four scrapes


@dataclass(frozen=True)
class SeriesView:
    """rows: the oldest first, ``step_secs`` apart; the last one ends at ``until``, in seconds since 1970. source: who
    has measured; why: why it is not the Prometheus that was to be asked."""

    step_secs: int
    until: float
    rows: tuple[Row, ...]
    source: str = OWN
    why: str | None = None

    def column(self, name: str) -> list[float]:
        place = NAMES.index(name)
        return [row[place] for row in self.rows]

    def mapping(self) -> dict[str, Any]:
        """What was not measured is null."""
        columns = {name: [None if math.isnan(each) else each for each in self.column(name)] for name in NAMES}
        first = self.until - self.step_secs * len(self.rows)
        told = {"step_secs": self.step_secs, "since": rfc3339(first), "until": rfc3339(self.until)}
        return {**told, "source": self.source, "problem": self.why, **columns}


def show(node: Node, name: str, minutes: int) -> SeriesView:
    """The last so many minutes. Raises: Problem not_found; invalid."""
    node.state.read().get(name)
    if not 1 <= minutes <= LONGEST_MINUTES:
        raise invalid(f"Query parameter minutes must be 1 to {LONGEST_MINUTES}, not {minutes}")
    if not node.settings.prometheus_url:
        return own(node, name, minutes)
    try:
        return asked_for(node, name, minutes)
    except Problem as problem:
        return replace(own(node, name, minutes), why=problem.message)


def own(node: Node, name: str, minutes: int) -> SeriesView:
    """As the monitor has measured it."""
    ring = series.ring_for(minutes * 60)
    until = time.time() // ring.secs * ring.secs
    rows = file_of(node, name).read(ring, until - minutes * 60, until)
    each = -(-len(rows) // MOST_POINTS)
    # So that the means begin with whole ones, as they will be a moment later.
    rows = rows[len(rows) % each :] if each > 1 else rows
    return SeriesView(ring.secs * max(1, each), until, tuple(series.thinned(rows, max(1, len(rows) // max(1, each)))))


def asked_for(node: Node, name: str, minutes: int) -> SeriesView:
    """As the operator's Prometheus has it. Raises: Problem when it does not answer."""
    prometheus = Prometheus(node.settings.prometheus_url)
    step = max(series.FINE.secs, -(-minutes * 60 // MOST_POINTS))
    until = time.time() // step * step
    since = until - minutes * 60 // step * step
    labels = [f"instance={json.dumps(name)}", *filter(None, [node.settings.prometheus_labels])]
    words = {
        "calls": CALLS,  # first: it has words of its own
        "of": selector(labels),
        "wrong": selector([*labels, WRONG]),
        "hit": selector([*labels, 'outcome="hit"']),
        "durations": DURATIONS,
        "span": str(max(SHORTEST_RATE_SECS, step)),
    }
    queries = {column: filled(query, words) for column, query in QUERIES.items()}
    columns = prometheus.all_values(queries, since, until, step)
    if all(map(math.isnan, columns["calls"])):
        raise prometheus.unavailable(f"has nothing of {words['of']}")
    nothing = [math.nan] * round((until - since) / step)
    rows = tuple(zip(*(columns.get(column, nothing) for column in NAMES), strict=True))
    return SeriesView(step, until, rows, prometheus.name)


def selector(labels: Sequence[str]) -> str:
    return "{" + ",".join(labels) + "}"


def filled(query: str, words: Mapping[str, str]) -> str:
    """Not `format`: labels stand in braces."""
    for word, text in words.items():
        query = query.replace(f"{{{word}}}", text)
    return query


def newest(node: Node, name: str) -> dict[str, float | None]:
    """The last row, if it is of this minute; None for what was not measured."""
    row = file_of(node, name).newest(time.time())
    return {each: None if math.isnan(value) else value for each, value in zip(NAMES, row, strict=True)}


def file_of(node: Node, name: str) -> SeriesFile:
    return SeriesFile(Path(node.layout.series) / name)
