"""Freed memory goes back to the kernel. glibc keeps it for later, in arenas: up to eight of them for each core."""

from __future__ import annotations

import ctypes
import gc

LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)
LARGE_BYTES = 256 * 1024
ARENAS = 2


def keep_little() -> None:
    """Before there are threads: hundreds of them would otherwise keep what large messages took, each in its own arena.

    Large blocks get pages of their own, which go back at once; by itself glibc puts them between the small ones as
    soon as one of their size was freed, and then no page around them is ever empty.
    """
    if mallopt := getattr(LIBC, "mallopt", None):  # not in musl
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def set_up() -> None:
    """What exists now stays for good: no collection has to look at it again (35 ms for the multiplexer's modules)."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Some milliseconds for some hundred megabytes.

    Python's own collection of everything comes only once a quarter of all objects is new: what an exception and its
    frames keep in a cycle, a whole batch for instance, would stay for hours.
    """
    gc.collect()
    if trim := getattr(LIBC, "malloc_trim", None):
        trim(0)
