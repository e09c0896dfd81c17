"""What the appliance's cache of embeddings saved, from the header `x-tei-cache` of its answers and from their times."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class Told(NamedTuple):
    """What the header says of the texts of one request."""

    hits: int
    misses: int


def told(header: str | None, texts: int) -> Told | None:
    """`hit`, `miss` or `bypass` for one text, `hits=12, misses=20` for several; None where the cache was not asked."""
    words = (header or "").strip().lower()
    if words == "hit":
        return Told(texts, 0)
    if words == "miss":
        return Told(0, texts)
    counts = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", words)}
    return Told(counts.get("hits", 0), counts.get("misses", 0)) if {"hits", "misses"} & counts.keys() else None


@dataclass
class _Sum:
    """Of answers of one kind."""

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0


@dataclass
class Savings:
    """The sum of some answers. Answers with hits alone, misses alone and both are held apart: only the first two say
    what one of a kind takes."""

    found: _Sum = field(default_factory=_Sum)
    computed: _Sum = field(default_factory=_Sum)
    mixed: _Sum = field(default_factory=_Sum)
    asked: int = 0  # answers without the header are counted here alone

    def add(self, texts: int, header: str | None, seconds: float) -> None:
        self.asked += texts
        answer = told(header, texts)
        if answer is None:
            return
        kind = self.mixed if all(answer) else self.found if answer.hits else self.computed
        kind.hits += answer.hits
        kind.misses += answer.misses
        kind.seconds += seconds

    @property
    def hits(self) -> int:
        return self.found.hits + self.mixed.hits

    @property
    def misses(self) -> int:
        return self.computed.misses + self.mixed.misses

    @property
    def seconds_per_text(self) -> float | None:
        """How long a text takes that is computed; None before any was."""
        return self.computed.seconds / self.computed.misses if self.computed.misses else None

    def saved(self, seconds_per_text: float | None) -> float | None:
        """Seconds: hits x seconds_per_text - the time that the hits took; None where the former is not known.

        Of an answer with both the hits took what the misses did not."""
        if not self.hits:
            return 0.0
        if seconds_per_text is None:
            return None
        of_mixed = max(0.0, self.mixed.seconds - self.mixed.misses * seconds_per_text)
        return self.hits * seconds_per_text - self.found.seconds - of_mixed
