"""What each row of a combined call has cost, as one value of metadata: `chars:tokens:hit,chars:tokens:hit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LARGEST_COUNT = 2**32 - 1  # of tei.v1's fields: a long text may stand in a million rows, or be ranked with each


class RowUsage(NamedTuple):
    """hit: 1 when the cache had it."""

    chars: int
    tokens: int
    hit: int


def packed(rows: Iterable[RowUsage]) -> str:
    return ",".join(f"{row.chars}:{row.tokens}:{row.hit}" for row in rows)


def unpacked(value: str) -> list[RowUsage]:
    """Raises: ValueError for what `packed` has not written."""
    return [RowUsage(*map(int, row.split(":", 2))) for row in value.split(",")]
