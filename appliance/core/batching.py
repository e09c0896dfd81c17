"""How a batch of rows becomes work for replicas, and how its pieces are mended when one dies.

Theory of operation. Every distinct text is computed once. The distinct rows are sorted by length, longest first, and
cut into slices of about equal cost, so that what a replica computes together has little padding and the last slices
to finish are small. Slices wait in one list; each replica takes the next one when it has room, so a slow replica takes
fewer, and nothing has to be known about speeds.

A slice is answered in order. What happens to the rest of it when its stream ends early:

    ended by                    rows not answered
    the row itself (bad text)   the first one has failed; the rest is a slice of its own
    the replica (death, hang)   the rest again, elsewhere, and *carefully*: one row in flight at a time
    a hang, carefully           the one row in flight has failed: it hung two replicas; the rest again, carefully
    a death, carefully          the one row in flight is *suspect*, and has failed if its next replica dies as well
    no connection               nothing was asked: the same again, and nobody is to blame

A careful slice has its replica for itself, as far as this process sends batches there: otherwise one row could be
blamed for what another did. Three deaths and not two, because replicas also die for reasons of their own: two of them,
one after the other, would otherwise cost a caller an innocent row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

SMALLEST, LARGEST = 16, 128  # rows of a slice: a stream costs about as much as ten rows; a dead one is computed again
SLICES_PER_REPLICA = 8


@dataclass(frozen=True)
class Slice:
    """Rows that go to one replica on one stream, in this order."""

    rows: tuple[int, ...]
    careful: bool = False
    avoid: str | None = None  # the replica that died with it, by address
    suspect: bool = False  # a replica died while the first row was alone in flight


class Waiting:
    """The slices that wait for a replica, those with a history first: each of them may need another one.

    All others are alike: where one finds no room, none does. So a look at them is a look at the first, and a batch
    costs in proportion to its rows also where one row at a time fits (all of them looked at for each answer: 14.6 ms
    of CPU a row at 16,000 rows).
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.plain = deque(slices)
        self.mended: deque[Slice] = deque()

    def __len__(self) -> int:
        return len(self.plain) + len(self.mended)

    @property
    def rows(self) -> int:
        return sum(len(each.rows) for group in (self.mended, self.plain) for each in group)

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

    def appendleft(self, left: Slice) -> None:
        """Put back what is left of a slice, in front of those of its kind."""
        (self.mended if left.careful or left.avoid else self.plain).appendleft(left)


def plan(lengths: Sequence[int], replicas: int, largest: int = LARGEST) -> list[Slice]:
    """Slices that hold every index of ``lengths`` once, longest first.

    lengths: any measure of cost per row. largest: rows of a slice, where less than LARGEST fit through a gate.
    """
    largest = max(1, min(largest, LARGEST))
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    share = sum(lengths) / (SLICES_PER_REPLICA * max(1, replicas)) or 1
    slices: list[Slice] = []
    begin, cost = 0, 0
    for end, row in enumerate(order, start=1):
        cost += lengths[row]
        count = end - begin
        if end == len(order) or count == largest or (cost >= share and count >= SMALLEST):
            slices.append(Slice(tuple(order[begin:end])))
            begin, cost = end, 0
    return slices


def without(slices: Sequence[Slice], rows: Container[int]) -> list[Slice]:
    """The slices, less the rows that shall not be computed."""
    kept = [replace(cut, rows=tuple(row for row in cut.rows if row not in rows)) for cut in slices]
    return [cut for cut in kept if cut.rows]


def after_bad_row(cut: Slice, answered: int) -> tuple[int | None, Slice | None]:
    """(the row that failed, what is left) when the row after ``answered`` ended the stream by its own fault."""
    if answered == len(cut.rows):
        return None, None
    return cut.rows[answered], rest(cut, answered + 1, careful=cut.careful, avoid=cut.avoid)


def after_death(cut: Slice, answered: int, address: str, hung: bool = False) -> tuple[int | None, Slice | None]:
    """(the row to blame or None, what is left) when the replica at ``address`` ended the stream.

    hung: it did not die, but owes the next answer for too long.
    """
    if answered == len(cut.rows):
        return None, None
    if cut.careful and (hung or (cut.suspect and answered == 0)):
        return cut.rows[answered], rest(cut, answered + 1, careful=True, avoid=address)
    return None, rest(cut, answered, careful=True, avoid=address, suspect=cut.careful)


def after_no_connection(cut: Slice, address: str) -> Slice:
    """What is left when the replica at ``address`` was never reached."""
    return Slice(cut.rows, cut.careful, address, cut.suspect)


def rest(cut: Slice, begin: int, careful: bool, avoid: str | None, suspect: bool = False) -> Slice | None:
    return Slice(cut.rows[begin:], careful, avoid, suspect) if begin < len(cut.rows) else None
