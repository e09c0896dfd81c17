"""What a measurement with more and more requests in flight says: where an instance is saturated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEVELS = (1, 2, 4, 8, 16, 32, 64)  # requests in flight
AS_GOOD_AS_THE_BEST = 0.95


@dataclass(frozen=True)
class LoadStep:
    """With so many requests in flight. Milliseconds are those of one request."""

    concurrency: int
    texts_per_sec: float
    p50_ms: float
    p95_ms: float
    requests: int
    failed: int
    first_error: str | None

    def mapping(self) -> dict[str, Any]:
        return asdict(self)


def saturation(steps: Sequence[LoadStep]) -> int | None:
    """The fewest requests in flight that reach 95 % of the best throughput: more of them wait longer for the same. None
    where nothing was answered."""
    best = max((step.texts_per_sec for step in steps), default=0.0)
    reached = (step.concurrency for step in steps if step.texts_per_sec >= AS_GOOD_AS_THE_BEST * best)
    return next(reached, None) if best > 0 else None
