"""Conditions: what the machine can refuse, each with its event in the journal and its words in `/health`."""

from __future__ import annotations

import errno
from typing import NamedTuple

from appliance.core.events import Event

BY_ERRNO = {
    errno.ENOSPC: Event.DISK_FULL,
    errno.EDQUOT: Event.DISK_FULL,
    errno.EROFS: Event.READ_ONLY,
    errno.EACCES: Event.READ_ONLY,
    errno.EPERM: Event.READ_ONLY,
    errno.EMFILE: Event.NO_DESCRIPTORS,
    errno.ENFILE: Event.NO_DESCRIPTORS,
}
HINTS = {
    Event.DISK_FULL: "free disk space; until then no change is accepted, and what runs goes on",
    Event.READ_ONLY: "make it writable for this user; until then no change is accepted, and what runs goes on",
    Event.NO_DESCRIPTORS: "raise the limit of open files (ulimit -n)",
    Event.DISK_FAILING: "look at the kernel's log",
    Event.STATE_UNREADABLE: "no change is accepted, and what runs goes on. Run the release that wrote it, or put a "
    "copy back that this one reads; to begin with nothing, move both files away",
    Event.KEYS_UNREADABLE: "mend it, or make it readable for this user; it is looked at again all the time",
}


class Condition(NamedTuple):
    """One thing that is wrong with the machine under the appliance."""

    event: Event
    message: str


def from_error(error: OSError, what: str) -> Condition:
    """The condition that made the machine refuse ``what``."""
    event = BY_ERRNO.get(error.errno or 0, Event.DISK_FAILING)
    hint = "somebody removed it: make it again" if error.errno == errno.ENOENT else HINTS[event]
    return Condition(event, f"{what}: {error.strerror or error}; {hint}")
