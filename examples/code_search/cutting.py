"""Cuts a text into chunks of whole lines: along its syntax where that is known, else along its paragraphs.

Nothing is lost and nothing is there twice: every line that has more than blanks is in exactly one chunk, but for a line
longer than a chunk may be, whose pieces are chunks.
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

LIMIT = 1000  # characters; MiniLM reads 256 tokens, some three to four characters of code each
JOINED = 500  # neighbours together below this are one chunk: a lone import or closing bracket finds nothing


class Block(NamedTuple):
    """A part of the text that belongs together, such as a function; first, last: its lines, from 0."""

    first: int
    last: int
    inner: Sequence["Block"] = ()


class Chunk(NamedTuple):
    """first, last: line numbers, from 1, both included. column: where it begins, 0 but for pieces of long lines."""

    first: int
    last: int
    column: int
    text: str

    def key(self, path: str) -> str:
        """The same for the same text at the same place of the same file, in every run: a UUID, as Qdrant's ids are."""
        parts = (path, str(self.first), str(self.last), str(self.column), self.text)
        return str(uuid.UUID(bytes=hashlib.sha256("\0".join(parts).encode()).digest()[:16]))


class _Lines:
    """The lines of a text, and how many characters stand in a range of them."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.before = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def size(self, first: int, last: int) -> int:
        return self.before[last + 1] - self.before[first] - 1

    def paragraphs(self) -> list[Block]:
        full = [bool(line.strip()) for line in self.lines]
        return [Block(at, at) for at, is_full in enumerate(full) if is_full and not (at and full[at - 1])]

    def ranges(self, first: int, last: int, blocks: Sequence[Block]) -> list[tuple[int, int]]:
        """Ranges that cover the lines from first to last. A block is cut only where it is too long for a chunk."""
        if self.size(first, last) <= LIMIT:
            return [(first, last)]
        starts = sorted({block.first for block in blocks if first < block.first <= last})
        inner = [each for block in blocks if first <= block.first <= last for each in block.inner]
        if not starts:
            return self.ranges(first, last, inner) if inner else self.by_lines(first, last)
        pieces: list[tuple[int, int]] = []
        for begin, end in zip([first, *starts], [*(start - 1 for start in starts), last], strict=True):
            pieces += self.ranges(begin, end, [each for each in inner if begin <= each.first <= end])
        return self.joined(pieces)

    def by_lines(self, first: int, last: int) -> list[tuple[int, int]]:
        pieces = [(first, first)]
        for line in range(first + 1, last + 1):
            begin, _ = pieces[-1]
            if self.size(begin, line) <= LIMIT:
                pieces[-1] = (begin, line)
            else:
                pieces.append((line, line))
        return pieces

    def joined(self, pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for begin, end in pieces:
            if found and self.size(found[-1][0], end) <= JOINED:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
        return found

    def trimmed(self, first: int, last: int) -> tuple[int, int] | None:
        """Without blank lines at its ends; None where there is nothing else."""
        full = [line for line in range(first, last + 1) if self.lines[line].strip()]
        return (full[0], full[-1]) if full else None


def cut(text: str, outline: Sequence[Block] = ()) -> Iterator[Chunk]:
    """The chunks of a text in the order of its lines. outline: its outermost blocks, where the syntax is known."""
    held = _Lines(text)
    for first, last in held.ranges(0, len(held.lines) - 1, outline or held.paragraphs()):
        lines = held.trimmed(first, last)
        if lines is None:
            continue
        begin, end = lines
        piece = "\n".join(held.lines[begin : end + 1])
        for column in range(0, len(piece), LIMIT) if begin == end else [0]:
            text_of = piece[column : column + LIMIT] if begin == end else piece
            if text_of.strip():
                yield Chunk(begin + 1, end + 1, column, text_of)
