"""Which texts may go to the replicas of an instance now, which wait, and which are refused.

Theory of operation. An instance has a capacity in texts: what its ready replicas take at once. Two lanes share it:

    lane          admitted while                                                     waits for
    interactive   running texts < capacity                                           its turn among interactive calls
    bulk          bulk texts + slice <= capacity - max(reserve, interactive demand)  its turn among bulk slices,
                  but never less than one slice                                      first come, first served

reserve is the share of the capacity that batches leave free, so that a single text finds a permit at once; interactive
demand is what runs and waits there, so batches shrink while many single texts come. Bulk gets at least one slice, so it
always moves. Interactive calls wait in a bounded queue.

One call more is refused, with the time after which there is a permit for it: when all texts ahead are answered, those
of refused callers among them. So callers that come back when they were told to come one after the other, as fast as
permits are released. While refusals go on the time grows, up to twice as much: a caller that was admitted comes at once
with its next text, so of those that come back only a share is admitted, and each refusal costs a third of an answer. At
twice the time one of four calls is refused.

The rate at which permits are released is measured while calls wait, because only then it is all that the replicas can
do; before that, while anything is in work. Time without work does not count. Bulk waits in its own job, which is
bounded by its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

UNMEASURED_SECS = 0.1  # what a text takes, until one was answered
MEMORY_SECS = 5.0  # of work; how long the drain rate remembers
LONGEST_FACTOR = 2.0  # on the honest time, while refusals go on


class Verdict(StrEnum):
    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass
class Lanes:
    """The counts of one instance in one process. Not thread-safe: the owner locks. now: seconds of any clock."""

    capacity: int
    max_size: int
    interactive_share: float
    interactive: int = 0  # texts running
    bulk: int = 0
    waiting: int = 0  # interactive calls in the queue
    answered_texts: float = 0.0  # lately, and the seconds of work that they took
    work_secs: float = 0.0
    measured_full: bool = False  # that was while calls waited
    rated_at: float = 0.0
    sent_away: float = 0.0  # callers that were refused and have not come back
    sent_away_secs: float = 0.0  # for how long, the last of them
    refused_at: float = 0.0
    refusing_since: float = 0.0
    factor: float = 1.0

    def verdict_on_single(self) -> Verdict:
        """On one more interactive text, which does not wait yet."""
        if self.waiting == 0 and self.admits_single:
            return Verdict.ADMIT
        return Verdict.WAIT if self.waiting < self.max_size else Verdict.REFUSE

    @property
    def admits_single(self) -> bool:
        return self.interactive + self.bulk < self.capacity

    def admits_singles(self, texts: int) -> bool:
        """Whether ``texts`` single texts may start at once, and none was before them."""
        return self.waiting == 0 and self.interactive + self.bulk + texts <= self.capacity

    def admits_bulk(self, texts: int) -> bool:
        """Whether a slice of ``texts`` texts may start; one slice always may."""
        if self.bulk == 0:
            return True
        reserve = math.ceil(self.capacity * self.interactive_share)
        return self.bulk + texts <= self.capacity - max(reserve, self.interactive + self.waiting)

    @property
    def bulk_limit(self) -> int:
        """Texts that bulk may have while no single text is there, at least 1."""
        return max(1, self.capacity - math.ceil(self.capacity * self.interactive_share))

    @property
    def idle(self) -> bool:
        return not (self.interactive or self.bulk)

    def begin_work(self, now: float) -> None:
        """Work comes after a time without."""
        self.rated_at = now

    @property
    def rate(self) -> float:
        """Texts answered in a second of work."""
        return self.answered_texts / self.work_secs if self.work_secs else max(1, self.capacity) / UNMEASURED_SECS

    def count_answers(self, texts: int, now: float) -> None:
        """Feed the drain rate with answers and seconds; both are forgotten exponentially."""
        elapsed = max(0.0, now - self.rated_at)
        self.rated_at = now
        full = self.waiting > 0
        if self.measured_full and not full:
            return
        if full and not self.measured_full:
            self.measured_full, self.answered_texts, self.work_secs = True, 0.0, 0.0
        kept = math.exp(-elapsed / MEMORY_SECS)
        self.answered_texts = self.answered_texts * kept + texts
        self.work_secs = self.work_secs * kept + elapsed

    def count_refusal(self, now: float) -> int:
        """Count a refusal; returns its retry-after in milliseconds."""
        if self.sent_away:
            self.sent_away *= math.exp((self.refused_at - now) / self.sent_away_secs)
        if self.sent_away < 1:
            self.refusing_since = now
        self.refused_at = now
        drained_secs = self.texts_ahead / max(self.rate, 1e-9)
        self.factor = min(LONGEST_FACTOR, 1 + (now - self.refusing_since) / drained_secs)
        retry_after_ms = self.retry_after_ms()
        self.sent_away += 1
        self.sent_away_secs = retry_after_ms / 1000
        return retry_after_ms

    @property
    def texts_ahead(self) -> float:
        """Texts that are answered before one that is refused now."""
        return max(1.0, self.interactive + self.bulk + self.waiting + self.sent_away)

    def retry_after_ms(self) -> int:
        """When a caller that is refused now may hope for a permit, 10 ms to a minute."""
        if not self.answered_texts and self.work_secs:
            return 60_000  # they compute, and answer nothing
        return max(10, min(60_000, math.ceil(self.factor * self.texts_ahead / self.rate * 1000)))
