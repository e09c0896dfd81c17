"""Freed memory goes back to the kernel. glibc keeps it for later, in arenas: up to eight of them for each core."""

from __future__ import annotations

import ctypes

LIBC = ctypes.CDLL(None)
M_ARENA_MAX = -8  # of mallopt(3)
ARENAS = 2


def few_arenas() -> None:
    """Before there are threads: hundreds of them would otherwise keep what large messages took, each in its own."""
    if mallopt := getattr(LIBC, "mallopt", None):
        mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Some milliseconds for some hundred megabytes."""
    if trim := getattr(LIBC, "malloc_trim", None):  # not in musl
        trim(0)
