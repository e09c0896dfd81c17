"""A histogram of Prometheus that is cheap to observe and to write.

The engine has up to 15, with 540 lines. prometheus_client (0.26) takes 5 ms of CPU to write them, which each scrape of
each of a hundred engines pays, and 2.4 us for an observation, of which a text has nine; this one takes 0.3 ms and 0.9
us (2 cores).
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Histogram:
    """Thread-safe. buckets: the upper bounds, each included, ascending; the infinite one is added."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self.bounds = [*buckets, math.inf]
        self.counts = [0] * len(self.bounds)  # of each bucket alone
        self.sum = 0.0
        self.head = f"# HELP {name} {help}\n# TYPE {name} histogram\n"
        self.lines = "".join(f'{name}_bucket{{le="{floatToGoString(bound)}"}} %d\n' for bound in self.bounds)
        self.lines += f"{name}_count %d\n{name}_sum %r\n"
        self.lock = threading.Lock()

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        with self.lock:
            self.counts[bucket] += 1
            self.sum += value

    def text(self) -> str:
        """The Prometheus exposition."""
        with self.lock:
            counts, total = list(accumulate(self.counts)), self.sum
        return self.head + self.lines % (*counts, counts[-1], total)
