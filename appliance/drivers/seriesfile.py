"""The series of one instance in a file: two rings of rows, of a size that never changes (770 kB).

One process writes, others read: a reader may get a row that is half written, which is one wrong point in a picture.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from appliance.core import series
from appliance.core.series import COARSE, FINE, NAMES, NOTHING, PER_MEAN, Ring, Row

HEAD = struct.Struct("<4sIqq")  # a mark, how many columns, and of each ring the number of the newest row
MARK = b"ser1"
UNKNOWN = (-1, -1)
MOST_AHEAD = 6  # rows that the newest may be ahead of the clock
ROW = struct.Struct(f"<{len(NAMES)}f")
SIZE = HEAD.size + ROW.size * (FINE.rows + COARSE.rows)


class SeriesFile:
    """A row's number is its time divided by what it stands for: so two writers of one moment write the same place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, at: float, row: Sequence[float]) -> None:
        """at: seconds since 1970; a time that is not later than the newest row's changes nothing. Raises: OSError."""
        number = int(at // FINE.secs)
        with self.opened() as file:
            if self.head(file) == UNKNOWN or os.fstat(file.fileno()).st_size != SIZE:  # it is none of ours
                self.begin(file)
            newest, mean_of = self.head(file)
            if newest > number + MOST_AHEAD:  # the clock was set back
                newest = self.erase(file, FINE, number, newest)
                mean_of = self.erase(file, COARSE, number // PER_MEAN, mean_of)
            if number <= newest:
                return
            self.write(file, FINE, newest, number, row)
            done = number // PER_MEAN - 1  # the last one of which all is known
            if done > mean_of:
                first = done * PER_MEAN
                found = self.rows(file, FINE, number, first, first + PER_MEAN)
                self.write(file, COARSE, mean_of, done, series.mean(found))
                mean_of = done
            os.pwrite(file.fileno(), HEAD.pack(MARK, len(NAMES), number, mean_of), 0)

    def read(self, ring: Ring, since: float, until: float) -> list[Row]:
        """The rows from ``since`` to ``until``, seconds since 1970; NOTHING where none was written."""
        first, last = int(since // ring.secs), int(until // ring.secs)
        try:
            with FileIO(self.path) as file:
                newest = self.head(file)[0 if ring is FINE else 1]
                return self.rows(file, ring, newest, first, last)
        except OSError:
            return [NOTHING] * max(0, last - first)

    def newest(self, now: float) -> Row:
        """The last row, if it is of this minute."""
        try:
            with FileIO(self.path) as file:
                number, _ = self.head(file)
                if not (now - 60) // FINE.secs <= number <= now // FINE.secs + 1:
                    return NOTHING
                return self.rows(file, FINE, number, number, number + 1)[0]
        except OSError:
            return NOTHING

    def opened(self) -> FileIO:
        """For writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            self.path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self.path, flags, 0o666)
        return FileIO(descriptor, "r+b")

    def begin(self, file: FileIO) -> None:
        file.truncate(0)
        empty = HEAD.pack(MARK, len(NAMES), 0, 0) + ROW.pack(*NOTHING) * (FINE.rows + COARSE.rows)
        os.pwrite(file.fileno(), empty, 0)

    def head(self, file: FileIO) -> tuple[int, int]:
        """The numbers of the newest rows, 0 before the first; UNKNOWN in what is no such file."""
        found = os.pread(file.fileno(), HEAD.size, 0)
        if len(found) < HEAD.size:
            return UNKNOWN
        mark, columns, fine, coarse = HEAD.unpack(found)
        return (fine, coarse) if (mark, columns) == (MARK, len(NAMES)) else UNKNOWN

    def write(self, file: FileIO, ring: Ring, newest: int, number: int, row: Sequence[float]) -> None:
        """What lies between the newest row and this one was not measured, and has what was there a round ago."""
        for skipped in range(max(newest + 1, number - ring.rows + 1), number if newest else 0):
            os.pwrite(file.fileno(), ROW.pack(*NOTHING), place(ring, skipped))
        os.pwrite(file.fileno(), ROW.pack(*row), place(ring, number))

    def erase(self, file: FileIO, ring: Ring, first: int, newest: int) -> int:
        """The rows from ``first`` on, which are of a time that has not come; the number of the newest one left."""
        for number in range(max(first, newest - ring.rows + 1), newest + 1):
            os.pwrite(file.fileno(), ROW.pack(*NOTHING), place(ring, number))
        return min(newest, first - 1)

    def rows(self, file: FileIO, ring: Ring, newest: int, first: int, last: int) -> list[Row]:
        """Those with numbers from ``first`` to before ``last``."""
        oldest = max(1, newest - ring.rows + 1)
        wanted = range(max(first, oldest), min(last, newest + 1))
        found: list[Row] = []
        number = wanted.start
        while number < wanted.stop:  # at most twice: to the end of the ring, and from its beginning
            until = min(wanted.stop, number + ring.rows - number % ring.rows)
            data = os.pread(file.fileno(), ROW.size * (until - number), place(ring, number))
            found += [tuple(each) for each in ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size])]
            number = until
        before = max(0, min(last, wanted.start) - first)
        return [*[NOTHING] * before, *found, *[NOTHING] * (max(0, last - first) - before - len(found))]


def place(ring: Ring, number: int) -> int:
    """In bytes from the beginning of the file."""
    begin = HEAD.size + (0 if ring is FINE else ROW.size * FINE.rows)
    return begin + ROW.size * (number % ring.rows)
