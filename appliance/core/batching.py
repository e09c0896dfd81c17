"""How the texts of a batch become work for replicas, and how its pieces are mended when one dies.

Theory of operation. A caller sends rows; equal rows have one text, and each distinct text is computed once. The texts
are sorted by length, longest first, and cut into slices of about equal cost, so that what a replica computes together
has little padding and the last slices to finish are small. Slices wait in one list; each replica takes the next one
when it has room, so a slow replica takes fewer, and nothing has to be known about speeds.

A slice is answered in order. What happens to the rest of it when its stream ends early:

    ended by                   texts not answered
    the text itself (bad)      the first one has failed; the rest is a slice of its own
    the replica (death, hang)  the rest again, elsewhere, and *carefully*: one text in flight at a time
    a hang, carefully          the one text in flight has failed: it hung two replicas; the rest again, carefully
    a death, carefully         the one text in flight is *suspect*, and has failed if its next replica dies as well
    no connection              nothing was asked: the same again, and no text is to blame

A careful slice has its replica for itself, as far as this process sends batches there: otherwise one text could be
blamed for what another did. Three deaths and not two, because replicas also die for reasons of their own: two of them,
one after the other, would otherwise cost a caller an innocent text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

SMALLEST, LARGEST = 16, 128  # texts of a slice: a stream costs about as much as ten; a dead one is computed again
SLICES_PER_REPLICA = 8


@dataclass(frozen=True)
class Slice:
    """Texts that go to one replica on one stream, in this order; each is its number in the batch."""

    texts: tuple[int, ...]
    careful: bool = False
    avoid: str | None = None  # the address of the replica that died with it
    suspect: bool = False  # a replica died while the first text was alone in flight


class WaitingSlices:
    """The slices that wait for a replica, those with a history first: each of them may need another one.

    All others are alike: where one finds no permits, none does. So a look at them is a look at the first, and a batch
    costs in proportion to its texts also where one text at a time fits (all of them looked at for each answer: 14.6 ms
    of CPU a text at 16,000 texts).
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.plain = deque(slices)
        self.mended: deque[Slice] = deque()

    def __len__(self) -> int:
        return len(self.plain) + len(self.mended)

    @property
    def text_count(self) -> int:
        return sum(len(each.texts) for group in (self.mended, self.plain) for each in group)

    def candidates(self) -> Iterator[Slice]:
        """What is worth a try now. Valid until something is added or removed."""
        yield from self.mended
        if self.plain:
            yield self.plain[0]

    def remove(self, candidate: Slice) -> None:
        if self.plain and candidate is self.plain[0]:
            self.plain.popleft()
        else:
            self.mended.remove(candidate)

    def put_back(self, left: Slice) -> None:
        """What is left of a slice, in front of those of its kind."""
        (self.mended if left.careful or left.avoid else self.plain).appendleft(left)


def plan(lengths: Sequence[int], replicas: int, largest: int = LARGEST) -> list[Slice]:
    """Slices that hold every index of ``lengths`` once, longest first.

    lengths: any measure of the cost of each text. largest: texts of a slice, where fewer than LARGEST are admitted.
    """
    largest = max(1, min(largest, LARGEST))
    order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
    share = sum(lengths) / (SLICES_PER_REPLICA * max(1, replicas)) or 1
    slices: list[Slice] = []
    begin, cost = 0, 0
    for end, text in enumerate(order, start=1):
        cost += lengths[text]
        count = end - begin
        if end == len(order) or count == largest or (cost >= share and count >= SMALLEST):
            slices.append(Slice(tuple(order[begin:end])))
            begin, cost = end, 0
    return slices


def without(slices: Sequence[Slice], texts: Collection[int]) -> Sequence[Slice]:
    """The slices, less the texts that must not be computed."""
    if not texts:
        return slices
    kept = [replace(cut, texts=tuple(text for text in cut.texts if text not in texts)) for cut in slices]
    return [cut for cut in kept if cut.texts]


class Mended(NamedTuple):
    """What becomes of the texts of a slice that were not answered."""

    failed: int | None  # the text to blame, if there is one
    left: Slice | None  # the others, to be computed


def after_bad_text(cut: Slice, answered: int) -> Mended:
    """When the text after ``answered`` ended the stream by its own fault."""
    if answered == len(cut.texts):
        return Mended(None, None)
    return Mended(cut.texts[answered], rest(cut, answered + 1, careful=cut.careful, avoid=cut.avoid))


def after_death(cut: Slice, answered: int, address: str, hung: bool = False) -> Mended:
    """When the replica at ``address`` ended the stream.

    hung: it did not die, but has owed the next answer for too long.
    """
    if answered == len(cut.texts):
        return Mended(None, None)
    if cut.careful and (hung or (cut.suspect and answered == 0)):
        return Mended(cut.texts[answered], rest(cut, answered + 1, careful=True, avoid=address))
    return Mended(None, rest(cut, answered, careful=True, avoid=address, suspect=cut.careful))


def after_no_connection(cut: Slice, address: str) -> Slice:
    """What is left when the replica at ``address`` was never reached."""
    return Slice(cut.texts, cut.careful, address, cut.suspect)


def rest(cut: Slice, begin: int, careful: bool, avoid: str | None, suspect: bool = False) -> Slice | None:
    return Slice(cut.texts[begin:], careful, avoid, suspect) if begin < len(cut.texts) else None
