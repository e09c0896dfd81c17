"""Whether one of our own programs hangs: it is there, and what it does all the time it does no more.

Theory of operation. supervisord starts what has ended, and cannot see what only looks alive. So the thread of each
program on which all else depends has a heartbeat, each second; that the others have much to do keeps it from nothing.
A program without one is judged by what the kernel tells of its processes:

    the program                                                         hangs
    has a heartbeat, has ended, or is held by a debugger                no
    was silent at fewer than LOOKS looks in a row                       not yet
    is stopped by a signal                                              after IDLE_SECS
    ran, or waited for a core or a disk, a tenth of the time or more    after BUSY_SECS: it works, or others do
    did less                                                            after its patience, which is IDLE_SECS mostly
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

LOOKS = 3
IDLE_SECS, BUSY_SECS = 20.0, 300.0
BUSY_SHARE = 0.1


class ProcessActivity(NamedTuple):
    """What the kernel tells of the processes of a program.

    active_secs: for how long they ran or waited for a core, since they were started. stopped: all of them, by a signal.
    traced, blocked: one of their threads is held by a debugger, or waits for a disk.
    """

    active_secs: float
    stopped: bool = False
    traced: bool = False
    blocked: bool = False


@dataclass(frozen=True)
class Silence:
    """Of a program without a heartbeat: when it had the last one, when it was looked at first, what it had done by
    then, and how many looks there were.

    Times are of a steady clock.
    """

    pid: int
    since: float
    looked_at: float
    active_secs: float
    looks: int = 1
    blocked: bool = False  # at one of them


def silent(before: Silence | None, pid: int, activity: ProcessActivity, now: float, since: float) -> Silence:
    """One more look at a program that has had no heartbeat since then."""
    if before is None or (before.pid, before.since) != (pid, since):  # it had one between two looks
        return Silence(pid, since, now, activity.active_secs, blocked=activity.blocked)
    return replace(before, looks=before.looks + 1, blocked=before.blocked or activity.blocked)


def why_hung(silence: Silence, activity: ProcessActivity, now: float, patience_secs: float = IDLE_SECS) -> str:
    """What shows that it hangs; empty where nothing does."""
    silent_secs = now - silence.since
    active = max(0.0, activity.active_secs - silence.active_secs)
    if activity.traced or silence.looks < LOOKS:
        return ""
    if activity.stopped:
        allowed, what = IDLE_SECS, "was stopped by a signal"
    elif silence.blocked or active >= BUSY_SHARE * (now - silence.looked_at):
        allowed, what = BUSY_SECS, "was busy with something else"
    else:
        allowed, what = patience_secs, "did nothing"
    return f"has had no heartbeat for {silent_secs:.0f} s and {what}" if silent_secs >= allowed else ""
