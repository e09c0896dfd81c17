"""The memory of this process: what callers may have of it at once, and that freed memory goes back to the kernel. glibc
keeps it for later, in arenas: up to eight of them for each core."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

from appliance.core.budget import Budget

LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)
LARGE_BYTES = 256 * 1024
ARENAS = 2
WAIT_SECS = 1.0  # for room in the budget


def limit_malloc() -> None:
    """Before there are threads: hundreds of them would otherwise keep what large messages took, each in its own arena.

    Large blocks get pages of their own, which go back at once; by itself glibc puts them between the small ones as
    soon as one of their size was freed, and then no page around them is ever empty.
    """
    if mallopt := getattr(LIBC, "mallopt", None):  # not in musl
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def freeze_startup_objects() -> None:
    """What exists now stays for good: no collection has to look at it again (35 ms for the multiplexer's modules)."""
    gc.collect()
    gc.freeze()


def collect_and_trim() -> None:
    """Some milliseconds for some hundred megabytes.

    Python's own collection of everything comes only once a quarter of all objects is new: what an exception and its
    frames keep in a cycle, a whole batch for instance, would stay for hours.
    """
    gc.collect()
    if trim := getattr(LIBC, "malloc_trim", None):
        trim(0)


class Reserve:
    """The budget of this process; threads wait here for room. ``core.budget`` says what is booked."""

    def __init__(self, limit_bytes: int) -> None:
        self.budget = Budget(limit_bytes)
        self.changed = threading.Condition()

    def reservation(self, size: int = 0) -> Reservation:
        """Raises: Problem when there was no room in time."""
        reservation = Reservation(self)
        reservation.grow(size)
        return reservation


class Reservation:
    """What one call has booked. Thread-safe; a context manager that gives everything back."""

    def __init__(self, reserve: Reserve) -> None:
        self.reserve = reserve
        self.size = 0
        self.released = False

    def grow(self, size: int, bounded: bool = True, wait_secs: float = WAIT_SECS) -> None:
        """Nothing once it was released. bounded: see `Budget.book`.

        Raises: Problem when there was no room in time, or never will be.
        """
        budget, changed = self.reserve.budget, self.reserve.changed
        until = time.monotonic() + wait_secs
        with changed:
            if self.released:
                return
            while size and not budget.book(size, self.size, bounded):
                if (left := until - time.monotonic()) <= 0:
                    raise budget.refusal(size)
                changed.wait(left)
            self.size += size

    def shrink(self, size: int) -> None:
        with self.reserve.changed:
            self.size -= size
            self.reserve.budget.release(size)
            self.reserve.changed.notify_all()

    def release(self) -> None:
        """Give back everything; more than once is as good as once."""
        with self.reserve.changed:
            self.reserve.budget.release(self.size)
            self.size, self.released = 0, True
            self.reserve.changed.notify_all()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
