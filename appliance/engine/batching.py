"""Texts of similar length run together, so that padding is not computed.

Theory of operation. Items wait sorted by length. When a worker is free it takes the oldest one as the anchor and fills
the batch with the nearest lengths on both sides, as long as

    rows x longest <= budget        (384 tokens: larger batches are slower on a CPU, smaller ones too; a GPU has more)
    rows x longest <= its share     (of all tokens that wait: a few texts are spread over all workers)
    longest - shortest <= max(4, 15 % of longest)   (on a GPU 32, 50 %)

The last two do not hold for what is computed within a millisecond: there a batch more costs more than it saves. With a
model of two layers of 32, five batches of six had one text, though four of five texts had come with others.

The next batch always holds the oldest item, so no item waits for ever: at most as many batches come before an item as
there were items before it. An idle worker starts at once with the items that there are.

Where there was no memory for a batch the next ones have half as many tokens, and twice as many again a minute later:
others may have needed it for that moment.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

CPU_TOKENS = 384
# Lengths of a batch; on a GPU the number of batches costs more than what is computed in vain.
WASTE, GPU_WASTE = 0.15, 0.5
SLACK, GPU_SLACK = 4, 32
GROW_SECS = 60.0
CHEAP_SECS = 0.001  # of one thread: what a batch more costs beside what it computes, several times


@dataclass(order=True)
class Item:
    """One text to compute; ordered by length, then by arrival."""

    length: int
    number: int
    work: Any = field(compare=False)
    taken: bool = field(default=False, compare=False)


class LengthQueue:
    """The waiting items, sorted by length, for ``shares`` workers. Not thread-safe: its owner locks."""

    def __init__(self, budget: int, most: int, by_length: bool, shares: int = 1, on_gpu: bool = False) -> None:
        self.waste, self.slack = (GPU_WASTE, GPU_SLACK) if on_gpu else (WASTE, SLACK)
        self.budget = self.full_budget = budget
        self.changed_at = float("-inf")  # the budget; time.monotonic
        self.most = most
        self.by_length = by_length
        self.shares = shares
        self.cheap = 0.0  # tokens that are computed within CHEAP_SECS
        self.tokens = 0  # of all waiting items
        self.by_age: deque[Item] = deque()
        self.sorted: list[Item] = []
        self.count = 0

    def __len__(self) -> int:
        return len(self.sorted)

    def put(self, length: int, work: Any) -> None:
        item = Item(length, self.count, work)
        self.tokens += length
        self.count += 1
        self.by_age.append(item)
        bisect.insort(self.sorted, item)

    def shrink(self, tokens: int, now: float) -> int:
        """A batch of so many tokens was too large: the next ones have at most half of them, which is returned."""
        self.budget, self.changed_at = min(self.budget, max(1, tokens // 2)), now
        return self.budget

    def grow(self, now: float) -> None:
        if self.budget < self.full_budget and now - self.changed_at > GROW_SECS:
            self.budget, self.changed_at = min(self.full_budget, self.budget * 2), now

    def next_batch(self, token_secs: float = math.inf) -> list[Any]:
        """Take the next batch out of the queue: at least one item; empty when nothing waits. token_secs: what a token
        costs, as far as that is known."""
        self.grow(time.monotonic())
        self.cheap = CHEAP_SECS / token_secs
        while self.by_age and self.by_age[0].taken:
            self.by_age.popleft()
        if not self.by_age:
            return []
        chosen = self.nearest() if self.by_length else self.oldest()
        batch = [item.work for item in chosen]
        for item in chosen:
            item.taken, item.work = True, None  # it stays in `by_age` until the next batch
            self.tokens -= item.length
        if self.by_length:
            first = bisect.bisect_left(self.sorted, chosen[0])
            del self.sorted[first : first + len(chosen)]
        else:
            self.sorted = [item for item in self.sorted if not item.taken]
        return batch

    def nearest(self) -> list[Item]:
        """A run of the sorted items around the oldest, in order of length."""
        budget = self.budget if self.tokens <= self.cheap else min(self.budget, self.tokens // self.shares)
        at = bisect.bisect_left(self.sorted, self.by_age[0])
        low, high = at, at + 1  # the run is sorted[low:high]
        while high - low < self.most:
            longer = self.fits(low, high + 1, budget)
            shorter = self.fits(low - 1, high, budget)
            if longer and (not shorter or self.gap(high, at) <= self.gap(low - 1, at)):
                high += 1
            elif shorter:
                low -= 1
            else:
                break
        return self.sorted[low:high]

    def fits(self, low: int, high: int, budget: int) -> bool:
        if low < 0 or high > len(self.sorted):
            return False
        shortest, longest = self.sorted[low].length, self.sorted[high - 1].length
        size = (high - low) * longest
        similar = longest - shortest <= max(self.slack, self.waste * longest)
        return size <= budget and (similar or size <= self.cheap)

    def gap(self, index: int, at: int) -> int:
        return abs(self.sorted[index].length - self.sorted[at].length)

    def oldest(self) -> list[Item]:
        """TEI's own rule: in order of arrival until the padded batch is full (its CPU back end takes at most 8)."""
        chosen: list[Item] = []
        longest = 0
        for item in self.by_age:
            if item.taken:
                continue
            longest = max(longest, item.length)
            if chosen and ((len(chosen) + 1) * longest > self.budget or len(chosen) >= self.most):
                break
            chosen.append(item)
        return chosen
