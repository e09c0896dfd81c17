"""Busy or hung: how a probe is judged that a replica did not answer in time.

Theory of operation. A probe waits until the forward pass in progress has ended, which cannot be interrupted: one of
8,192 tokens takes a healthy model 5 s to 3 minutes. So the monitor reads what the replica counts in its metrics
(`Work`), and judges how long the texts in progress may take:

    allowed = 10 x tokens x (1 + tokens / 1,024) x measured seconds a token; at least 2 s, at most 300 s

    the replica reports                                                the probe is
    nothing (it is frozen, or has no metrics)                          missed; busy, if the replica itself refused it
    more answers than at the look before                               busy
    nothing in progress besides our own probes                         missed
    something in progress, for no longer than allowed                  busy
    something in progress for longer                                   missed

The square: 384 wide, a token costs 0.10 ms in a short text and 0.55 ms in one of 8,192 (2 cores). Ten times: cores are
shared, and three such texts at once took 4 times as long as one. 2 s: less than any probe waits, so that a hang of
short texts is a miss at once. 300 s: a model of 24 layers, 1,024 wide, needs some 190 s for 8,192 tokens on 2 cores.

The embedded engine reports what is in progress and since when. For TEI it is inferred. Its queue is first in, first
out, so when it answers a probe all that came before is done. What is in progress came since, in batches no larger than
the largest that was made since, and for as long as it has been silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.core.health import ProbeResult

MULTIPLE = 10
SQUARE_TOKENS = 1024
LEAST_SECS, MOST_SECS = 2.0, 300.0
UNMEASURED_SECS = 0.005  # a token, until something was measured


class Running(NamedTuple):
    """Batches in progress: seconds since the oldest began, and the tokens of all of them; 0 and 0 for none."""

    secs: float
    tokens: float


@dataclass(frozen=True)
class Work:
    """The work that a process has reported, counted since its start."""

    answered: float = 0  # texts and requests together
    begun: float = 0  # texts
    ended: float = 0  # texts that were answered, failed or dropped
    batches: Mapping[float, float] = field(default_factory=dict)  # bound of tokens -> batches of at most so many
    token_secs: float | None = None  # measured; None while nothing was
    running: Running | None = None  # None where it is not reported: TEI


def late(earlier: Work | None, now: Work, calm: Work, own: int, silent_secs: float) -> tuple[ProbeResult, str]:
    """The table above, below its first line, and what is wrong in words.

    earlier: what it reported at the look before, None when there was none. calm: what it reported before the newest
    probe that was answered, that probe counted as begun. own: probes since, none of which was answered. silent_secs:
    since it last answered anything.
    """
    if earlier and now.answered > earlier.answered:
        return ProbeResult.BUSY, ""
    if now.running is not None:
        running = now.running
    else:
        running = Running(silent_secs, largest_since(now, calm) if others(now, calm, own) > 0 else 0)
    if not running.tokens:
        return ProbeResult.MISSED, ""
    # A batch in progress is among TEI's batches before its time is among the times: the earlier report is nearer.
    measured = [each for each in (calm.token_secs, now.token_secs) if each is not None]
    allowed = allowed_secs(running.tokens, max(measured, default=None))
    if running.secs <= allowed:
        return ProbeResult.BUSY, ""
    return (
        ProbeResult.MISSED,
        f"{running.tokens:g} tokens in progress for {running.secs:.1f} s, at most {allowed:.1f} s expected",
    )


def others(now: Work, calm: Work, own: int) -> float:
    """How many texts besides our own may be in progress. Both numbers bound it: TEI (1.9) counts no end for a text
    whose caller went away while it was computed, or that had no tokens, so the first only ever grows."""
    return min(now.begun - now.ended, now.begun - calm.begun) - own


def largest_since(now: Work, calm: Work) -> float:
    """A bound of the tokens of every batch that was made since; 0 when none was."""
    since = {bound: count - calm.batches.get(bound, 0) for bound, count in now.batches.items()}
    most = max(since.values(), default=0)
    return min((bound for bound, count in since.items() if count == most), default=0) if most else 0


def allowed_secs(tokens: float, token_secs: float | None) -> float:
    """How long a batch may be in progress before it counts as hung."""
    expected = tokens * (1 + tokens / SQUARE_TOKENS) * (UNMEASURED_SECS if token_secs is None else token_secs)
    return min(max(MULTIPLE * expected, LEAST_SECS), MOST_SECS)
