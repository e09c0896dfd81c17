"""Names for what the machine can refuse: the words of the journal and of `/health`."""

from __future__ import annotations

import errno
from typing import Literal

Condition = Literal[
    "disk_full", "read_only", "no_descriptors", "disk_failing", "state_unreadable", "keys_unreadable", "gpu_lost"
]

NAMES: dict[int, Condition] = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.EMFILE: "no_descriptors",
    errno.ENFILE: "no_descriptors",
}
HINTS: dict[Condition, str] = {
    "disk_full": "free disk space; until then no change is accepted, and what runs goes on",
    "read_only": "make it writable for this user; until then no change is accepted, and what runs goes on",
    "no_descriptors": "raise the limit of open files (ulimit -n)",
    "disk_failing": "look at the kernel's log",
    "state_unreadable": "no change is accepted, and what runs goes on. Run the release that wrote it, or put a copy "
    "back that this one reads; to begin with nothing, move both files away",
    "keys_unreadable": "mend it, or make it readable for this user; it is looked at again all the time",
}


def named(error: OSError, what: str) -> tuple[Condition, str]:
    """(name, message) of a refusal by the machine."""
    name = NAMES.get(error.errno or 0, "disk_failing")
    return name, f"{what}: {error.strerror or error}; {HINTS[name]}"
