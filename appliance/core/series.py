"""What an instance did in the course of time: every ten seconds for a day, and as means of five minutes for a month.

A row is measured from two looks at what our processes have counted; what was not measured is NaN. Rows lie in rings, at
the place that follows from their time, so that a ring never grows and nothing has to be deleted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Buckets = Mapping[float, float]  # upper bound in seconds -> calls so far that took no longer
Row = tuple[float, ...]
NAN = math.nan


class Ring(NamedTuple):
    """secs: that a row stands for; rows: before the oldest is written over."""

    secs: int
    rows: int


FINE, COARSE = Ring(10, 24 * 360), Ring(300, 31 * 288)
PER_MEAN = COARSE.secs // FINE.secs


@dataclass(frozen=True)
class Counts:
    """Of one instance so far, over all processes. hits: texts from the cache; queue: waiting now."""

    texts: float = 0.0
    calls: float = 0.0
    errors: float = 0.0
    hits: float = 0.0
    queue: float = 0.0
    durations: Buckets = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        """Of both ways of calls. Their buckets may have other bounds: each counts up to the next bound of the other."""
        bounds = self.durations.keys() | other.durations.keys()
        durations = {bound: up_to(bound, self.durations) + up_to(bound, other.durations) for bound in bounds}
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTERS}
        return replace(self, **sums, queue=self.queue + other.queue, durations=durations)

    def since(self, before: Counts) -> Counts | None:
        """What has happened since; None where somebody began to count anew. queue: as it is now."""
        differences = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        if min(differences.values()) < 0:
            return None
        return replace(self, **differences, durations=between(before.durations, self.durations))


COUNTERS = ("texts", "calls", "errors", "hits")


def between(before: Buckets, now: Buckets) -> Buckets:
    """Of the calls between two looks."""
    return {bound: max(0.0, calls - before.get(bound, 0.0)) for bound, calls in now.items()}


def up_to(bound: float, durations: Buckets) -> float:
    """The calls that took no longer, as far as the buckets tell."""
    return max((calls for upper, calls in durations.items() if upper <= bound), default=0.0)


class Measured(NamedTuple):
    """Rates are for each second. hits: texts from the cache; memory: resident, of all replicas, and on GPUs; ready:
    replicas that answer; golden_distance: of an answer to its golden one, 1 minus their cosine, the most of all."""

    texts: float
    calls: float
    errors: float
    hits: float
    p50_ms: float
    p95_ms: float
    queue: float
    memory_mib: float
    gpu_mib: float
    ready: float
    golden_distance: float


NAMES = Measured._fields
NOTHING: Row = (NAN,) * len(NAMES)


class Moment(NamedTuple):
    """What is so at the moment of a look: see `Measured`."""

    memory_mib: float
    gpu_mib: float
    ready: float
    golden_distance: float


def measured(happened: Counts | None, queue: float, secs: float, seen: Moment) -> Measured:
    """A row. happened: between two looks, ``secs`` apart; None where that is not known."""
    if happened is None or secs <= 0:
        return Measured(*(NAN,) * 6, queue, *seen)
    halves, most = (quantile(share, happened.durations) for share in (0.5, 0.95))
    return Measured(
        happened.texts / secs,
        happened.calls / secs,
        happened.errors / secs,
        happened.hits / secs,
        NAN if halves is None else halves * 1000,
        NAN if most is None else most * 1000,
        queue,
        *seen,
    )


def quantile(share: float, durations: Buckets) -> float | None:
    """The bound in seconds that this share of the calls did not exceed; None without a call.

    Within a bucket calls are taken for evenly spread, as Prometheus does.
    """
    bounds = sorted(durations)
    counts = [durations[bound] for bound in bounds]
    if not counts or not counts[-1]:
        return None
    wanted = share * counts[-1]
    lower, under = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= wanted:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - under) / (count - under)
        lower, under = bound, count
    return lower


def mean(rows: Iterable[Row]) -> Row:
    """Of each column what was measured; NaN where nothing was."""
    columns = list(zip(*rows))
    found = [[value for value in column if not math.isnan(value)] for column in columns]
    return tuple(sum(values) / len(values) if values else NAN for values in found) or NOTHING


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """As many rows at the most: means of as many neighbours each."""
    each = -(-len(rows) // most) if rows else 1
    return [mean(rows[first : first + each]) if each > 1 else rows[first] for first in range(0, len(rows), each)]


def ring_for(secs: float) -> Ring:
    """The one that reaches so far back."""
    return FINE if secs <= FINE.secs * FINE.rows else COARSE
