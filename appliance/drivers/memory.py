"""The memory of this process: reservations of its budget, and freed memory that goes back to the kernel.

glibc keeps freed memory for later, in arenas: up to eight of them for each core.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time

from appliance.core.budget import Budget

LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
LARGE_BYTES = 1024 * 1024
ARENAS = 2
KEPT_BYTES = 16 * 1024 * 1024  # at the end of an arena, until `collect_and_trim`
WAIT_SECS = 1.0  # until a reservation fits into the budget


def limit_malloc() -> None:
    """For a process without threads yet: hundreds of them would keep the memory of large messages, each in its arena.

    Large blocks get pages of their own, which go back at once. By default glibc puts them between the small ones as
    soon as one of their size was freed, and then no page around them is ever empty. What small blocks leave free at an
    arena's end is kept for the next call: with 128 kB, as by default, 500 rows began with 1,000 pages to be cleared.
    """
    if mallopt := getattr(LIBC, "mallopt", None):  # not in musl
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def freeze_startup_objects() -> None:
    """Exempt what exists now from garbage collection: it stays for good (35 ms for the multiplexer's modules)."""
    gc.collect()
    gc.freeze()


def disable_automatic_collection() -> None:
    """From now on only `collect_young` and `collect_and_trim` collect, thus only the thread that calls them.

    By itself Python collects in whatever thread makes an object. What ends there (answers with a permit, a limit) takes
    locks that this very thread may hold, and then it waits for itself, and every call for it.
    """
    gc.disable()


def collect_young() -> bool:
    """Collect garbage among what is new, if that is as much as Python itself waits for; else nothing (0.2 us). Returns
    which."""
    if gc.get_count()[0] <= gc.get_threshold()[0]:
        return False
    gc.collect(1)
    return True


def collect_and_trim() -> None:
    """Collect garbage and give free pages to the kernel; some milliseconds for some hundred megabytes.

    Python itself collects everything only once a quarter of all objects is new: a cycle of an exception and its frames,
    with a whole batch for instance, would stay for hours.
    """
    gc.collect()
    if trim := getattr(LIBC, "malloc_trim", None):
        trim(0)


class Reserve:
    """The budget of this process, for which threads wait here. `core.budget` says what is booked."""

    def __init__(self, limit_bytes: int) -> None:
        self.budget = Budget(limit_bytes)
        self.changed = threading.Condition()

    def reservation(self, size: int = 0) -> Reservation:
        """Raises: Problem when it does not fit in time."""
        reservation = Reservation(self)
        reservation.grow(size)
        return reservation


class Reservation:
    """What one call has booked. Thread-safe; a context manager that releases all of it."""

    def __init__(self, reserve: Reserve) -> None:
        self.reserve = reserve
        self.size = 0
        self.released = False

    def grow(self, size: int, bounded: bool = True, wait_secs: float = WAIT_SECS) -> None:
        """Book more; nothing once it was released. bounded: see `Budget.book`.

        Raises: Problem when it does not fit in time, or never will.
        """
        budget, changed = self.reserve.budget, self.reserve.changed
        until = time.monotonic() + wait_secs
        with changed:
            while not self.released:  # also by a thread that ends the call while this one waits
                if not size or budget.book(size, self.size, bounded):
                    self.size += size
                    return
                if (left := until - time.monotonic()) <= 0:
                    raise budget.refusal(size)
                changed.wait(left)

    def shrink(self, size: int) -> None:
        """Release some of it; nothing once all was released."""
        with self.reserve.changed:
            if self.released:
                return
            self.size -= size
            self.reserve.budget.release(size)
            self.reserve.changed.notify_all()

    def release(self) -> None:
        """Release everything; to call it again does nothing."""
        with self.reserve.changed:
            self.released = True
            if self.size:
                self.reserve.budget.release(self.size)
                self.size = 0
                self.reserve.changed.notify_all()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
