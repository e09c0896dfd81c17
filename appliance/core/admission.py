"""Who may go to the replicas of an instance now, who waits, and who is refused.

Theory of operation. An instance has a capacity in texts: what its ready replicas take at once. Two lanes share it:

    lane          admitted while                                                    waits for
    interactive   running texts < capacity                                          its turn among interactive calls
    bulk          bulk texts + cost <= capacity - max(reserve, interactive demand)   its turn among bulk slices,
                  but never less than one slice                                     first come, first served

reserve is the share of the capacity that batches leave free, so that a single text finds room at once; interactive
demand is what runs and waits there, so batches shrink while many single texts come. The least bulk can get is one
slice, so it always moves. Interactive calls wait in a bounded queue; one more is refused, with the time after which it
may hope for a place: all before it are answered by then, those among them who were sent away themselves. But whoever
was let in comes at once with his next text, so of those who come back only a share finds a place. A refusal costs as
much as a third of an answer; the time is long enough that of five who ask, one asks in vain. Bulk waits in its own job,
which is bounded by its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

SLOWEST_RATE = 0.5  # texts a second, assumed until some were answered
MEMORY_SECS = 5.0  # how long the drain rate remembers
IN_VAIN = 0.2  # of all who ask: those who are refused, when many are


class Verdict(StrEnum):
    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass
class Lanes:
    """The counts of one instance in one process. Not thread-safe: its owner locks."""

    capacity: int
    max_size: int
    interactive_share: float
    interactive: int = 0  # texts running
    bulk: int = 0
    waiting: int = 0  # interactive calls in the queue
    rate: float = SLOWEST_RATE  # texts answered a second, smoothed
    rated_at: float = 0.0
    away: float = 0.0  # callers that were sent away and have not come back
    away_secs: float = 0.0  # for how long, the last of them
    refused_at: float = 0.0

    def single(self) -> Verdict:
        """What one more interactive text gets that does not wait yet."""
        if self.waiting == 0 and self.room_for_single:
            return Verdict.ADMIT
        return Verdict.WAIT if self.waiting < self.max_size else Verdict.REFUSE

    @property
    def room_for_single(self) -> bool:
        return self.interactive + self.bulk < self.capacity

    def room_for_bulk(self, cost: int) -> bool:
        """Whether a slice of ``cost`` texts may start; one slice always may."""
        if self.bulk == 0:
            return True
        reserve = math.ceil(self.capacity * self.interactive_share)
        return self.bulk + cost <= self.capacity - max(reserve, self.interactive + self.waiting)

    @property
    def bulk_share(self) -> int:
        """Texts that bulk may have while no single text is there, at least 1."""
        return max(1, self.capacity - math.ceil(self.capacity * self.interactive_share))

    def answered(self, texts: int, now: float) -> None:
        """Feed the drain rate: an exponential average over the gaps between answers. now: seconds, any clock."""
        gap = now - self.rated_at
        self.rated_at = now
        if 0 < gap < 10 * MEMORY_SECS:
            weight = 1 - math.exp(-gap / MEMORY_SECS)
            self.rate += weight * (texts / gap - self.rate)

    def refused(self, now: float) -> int:
        """Count a refusal; returns its retry-after in milliseconds. now: seconds, any clock."""
        if self.away:
            self.away *= math.exp((self.refused_at - now) / self.away_secs)
        self.refused_at = now
        retry_after_ms = self.retry_after_ms()
        self.away += 1
        self.away_secs = retry_after_ms / 1000
        return retry_after_ms

    def retry_after_ms(self) -> int:
        """When a caller that is refused now may hope for a place, 10 ms to a minute."""
        rate = max(self.rate, SLOWEST_RATE)
        before = max(1.0, self.interactive + self.bulk + self.waiting + self.away)
        # When all who are away come back within w seconds, away / w a second ask beside the rate that find a place.
        spread = self.away * (1 - IN_VAIN) / IN_VAIN
        return max(10, min(60_000, math.ceil(max(before, spread) / rate * 1000)))
