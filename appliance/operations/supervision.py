"""Making supervisor match the state file, and ending what an earlier supervisord left behind.

`reconcile` may be repeated at any time by anybody: it renders the include file, asks supervisor for the difference, and
replaces the groups that differ. If a process dies after the commit of a change, the next reconcile finishes its work.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from appliance.core.instance import RESERVED_NAMES
from appliance.core.problems import Kind, Problem
from appliance.core.program import MARKER
from appliance.drivers import processes
from appliance.export.supervisord import instances_conf
from appliance.files.replacement import replace_file
from appliance.node.context import Node

LOCK_STRIPES = 64  # files that serialise work on groups: names share them, so that they never pile up
REPLACE_GRACE_SECS = 10  # on top of stopwaitsecs, before a stop counts as stuck


def reconcile(node: Node, names: Collection[str] | None = None) -> list[str]:
    """Make supervisor match the state file; returns the groups that were changed.

    names: wait for the work on these groups, also when another process is at it; groups of others that are being
    worked on are left to whoever does. None waits for all. Idempotent: a second run changes nothing.
    """
    done = []
    for group in sorted(apply_sections(node)):
        with group_lock(node, group, wait=names is None or group in names) as mine:
            # Whoever held the lock may have done the work: only what still differs is replaced.
            if mine and group in (difference := apply_sections(node)):
                replace(node, group, difference[group])
                done.append(group)
    return done


def apply_sections(node: Node) -> dict[str, str]:
    """Write the include file for the current state and ask supervisor what differs: group -> added|changed|removed.

    State is read, rendered, written and compared under one lock, so that an older rendering never follows a newer.
    """
    with FileLock(f"{node.layout.instances_conf}.lock", timeout=30):
        write_sections(node)
        added, changed, removed = node.supervisor.difference()
    kinds = {"added": added, "changed": changed, "removed": removed}
    return {group: kind for kind, groups in kinds.items() for group in groups if group not in RESERVED_NAMES}


def write_sections(node: Node) -> None:
    path = Path(node.layout.instances_conf)
    current = node.state.update(lambda same: same)  # repairs an unreadable file on the way
    text = instances_conf(current, node.settings, sys.executable, node.id, node.models.read().running)
    if not path.exists() or path.read_bytes() != text.encode():
        replace_file(path, text, durable=True)


def replace(node: Node, group: str, difference: str) -> None:
    if difference in ("changed", "removed"):
        node.supervisor.remove(group, node.settings.graceful_shutdown_timeout_secs + REPLACE_GRACE_SECS)
    if difference in ("changed", "added"):
        end_leftovers(node, group)
        node.supervisor.add(group)


@contextmanager
def group_lock(node: Node, group: str, wait: bool) -> Iterator[bool]:
    """The right to stop, remove and add one group. Yields False when another has it and ``wait`` is false."""
    stripe = int(hashlib.sha256(group.encode()).hexdigest(), 16) % LOCK_STRIPES
    longest = node.settings.graceful_shutdown_timeout_secs + 2 * REPLACE_GRACE_SECS
    path = Path(node.layout.group_lock(stripe))
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path, timeout=longest if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        if wait:
            raise Problem(
                Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", f'Another change of "{group}" takes longer than {longest} s'
            ) from None
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def end_leftovers(node: Node, group: str | None = None) -> list[str]:
    """End replicas that an earlier supervisord left behind, so that no replica ever has two processes.

    They are found by the marker in their environment, not by port: a port may be anybody's. group None: of all groups.
    Returns the markers of those that were ended.
    """
    known = {process.pid for process in node.supervisor.processes()} if node.supervisor.answers() else set()
    prefix = f"{node.id}:{group}:" if group else f"{node.id}:"
    return end_marked(node, prefix, known)


def end_orphans(node: Node) -> None:
    """End what carries our marker and is no child of the supervisord that runs now."""
    end_marked(node, f"{node.id}:", {node.supervisor.pid()})


def end_marked(node: Node, prefix: str, except_under: Collection[int | None]) -> list[str]:
    found = list(processes.marked(MARKER, prefix, except_under))
    processes.end([process for process, _ in found], node.settings.graceful_shutdown_timeout_secs)
    for process, marker in found:
        name = marker.split(":")[1]
        node.journal.record("orphan_ended", name, f'Left-over process {process.pid} of "{name}" ended')
    return [marker for _, marker in found]
