"""How many connections each worker process of an HTTP server has, in memory that all of them share.

The kernel tells all workers of a new connection, and whoever is first takes it: of 16 connections that came at once one
of two workers often had 11 or 13. Who has more than another waits for a moment, so that the other one is first.
"""

from __future__ import annotations

from collections.abc import Iterable

SLOTS = 64  # workers that are told apart
NOBODY = 2**62


class ConnectionCounts:
    """Each worker has a slot. counts: [SLOTS] int64, shared by the processes."""

    def __init__(self, counts: memoryview[int]) -> None:
        self.counts = counts
        for slot in range(SLOTS):
            self.leave(slot)

    def enter(self, taken: Iterable[int]) -> int:
        """The slot of a new worker, which counts as soon as it sets a number. taken: those of the workers that run."""
        slot = min(set(range(SLOTS)) - set(taken), default=0)
        self.leave(slot)
        return slot

    def leave(self, slot: int) -> None:
        """It takes no connections."""
        self.counts[slot] = NOBODY

    def set(self, slot: int, connections: int) -> None:
        self.counts[slot] = connections

    def has_more(self, slot: int) -> bool:
        """Whether another worker is to have the next connection."""
        return self.counts[slot] > min(self.counts)
