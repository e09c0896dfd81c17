"""What hits have saved: what a token takes to compute, as this process has measured it, times the tokens of hits."""

from __future__ import annotations

import threading

WEIGHT = 0.05  # of a new measurement


class Savings:
    """Seconds a token of each fingerprint, as a moving mean. Thread-safe.

    Measured on what was computed: for one text its time at the replica, for a batch the time of the batch, whatever ran
    beside it. Nothing is counted before something was measured.
    """

    def __init__(self) -> None:
        self.secs_per_token: dict[str, float] = {}
        self.lock = threading.Lock()

    def measured(self, fingerprint: str | None, tokens: int, secs: float) -> None:
        if not fingerprint or tokens <= 0 or secs <= 0:
            return
        with self.lock:
            before = self.secs_per_token.get(fingerprint)
            now = secs / tokens
            self.secs_per_token[fingerprint] = now if before is None else before + WEIGHT * (now - before)

    def of(self, fingerprint: str, tokens: int) -> float:
        return tokens * self.secs_per_token.get(fingerprint, 0.0)
