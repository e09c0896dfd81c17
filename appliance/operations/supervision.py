"""Making supervisor match the state file, and ending what an earlier supervisord left behind.

Any program may repeat `reconcile` at any time: it renders the include file, asks supervisor for the difference, and
replaces the processes that differ. If a process dies after the commit of a change, the next reconcile finishes the
work.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from appliance.core.events import Event
from appliance.core.instance import CAST
from appliance.core.layout import instance_of, is_number
from appliance.core.problems import Kind, Problem
from appliance.core.program import MARKER
from appliance.drivers import logs, processes
from appliance.export.supervisord import instance_conf, instances_conf
from appliance.files.locking import locked
from appliance.files.replacement import replace_file
from appliance.node import express
from appliance.node.context import Node

log = logging.getLogger(__name__)
LOCK_STRIPES = 64  # files that serialise work on groups: names share them, so that they never pile up
CONF_SECS = 30
REPLACE_GRACE_SECS = 10  # on top of stopwaitsecs, before a stop counts as stuck


def reconcile(node: Node, names: Collection[str]) -> list[str]:
    """Make supervisor match the state file; returns the groups that were changed.

    names: wait for the work on these groups, also when another process is at it; groups of others that are being
    worked on are left to the process that does. Idempotent: a second run changes nothing. Raises: Problem for the
    groups of ``names``; what fails for another one is tried again at the next reconcile.
    """
    done, kinds = [], None
    for group in sorted(names):
        with group_lock(node, group, wait=True):
            # Asked under the lock, and once: supervisord does nothing else while it reads the file.
            kinds = apply_sections(node)
            if kind := kinds.get(group):
                replace(node, group, kind)
                done.append(group)
    if kinds is None:
        kinds = apply_sections(node)
    for group in sorted(kinds.keys() - set(names)):
        try:
            with group_lock(node, group, wait=False) as mine:
                # The holder of the lock may have done the work: only what still differs is replaced.
                if mine and (kind := apply_sections(node).get(group)):
                    replace(node, group, kind)
                    done.append(group)
        except Problem as failure:
            log.error('The processes of "%s" are not as they should be: %s', group, failure.message)
    return done


def apply_sections(node: Node) -> dict[str, str]:
    """Write the include file for the current state and ask supervisor what differs: group -> added|changed|removed.

    State is read, rendered, written and compared under one lock, so that an older rendering never follows a newer.
    """
    with conf_lock(node):
        write_sections(node)
        return difference(node)


def conf_lock(node: Node) -> AbstractContextManager[None]:
    """The right to write the include file and to compare it. Raises: Problem."""
    path = f"{node.layout.instances_conf}.lock"
    words = f"Cannot lock {path} within {CONF_SECS} s, others change it: try again"
    return file_lock(path, CONF_SECS, Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", words))


def file_lock(path: str, longest_secs: float, taken: Problem) -> AbstractContextManager[None]:
    """As `locked`. Raises: also Problem for a disk that refuses."""
    return locked(path, longest_secs, taken, partial(unwritable, path))


def unwritable(path: str | Path, error: OSError) -> Problem:
    words = f"Cannot write {path}: {error.strerror or error}; free disk space or make the folder writable"
    return Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", words)


def write_sections(node: Node) -> None:
    node.state.restore()
    try:
        Path(node.settings.log_dir).mkdir(exist_ok=True)  # without it supervisord reads no section
    except OSError as error:
        raise unwritable(node.settings.log_dir, error) from error
    path, state = Path(node.layout.instances_conf), node.state.read()
    text = instances_conf(state, node.settings, sys.executable, node.id, node.models.read().running)
    if not path.exists() or path.read_bytes() != text.encode():
        try:
            replace_file(path, text, durable=True)
        except OSError as error:
            raise unwritable(path, error) from error


def difference(node: Node) -> dict[str, str]:
    """What supervisor would change for the include file as it is: group -> added|changed|removed."""
    added, changed, removed = node.supervisor.difference()
    kinds = {"added": added, "changed": changed, "removed": removed}
    return {group: kind for kind, groups in kinds.items() for group in groups if group not in CAST}


def differs(node: Node, name: str) -> bool:
    """Whether a reconcile would change the group of an instance. Nothing is written."""
    with conf_lock(node):
        instance = node.state.read().instances.get(name)
        path = Path(node.layout.instances_conf)
        text = path.read_bytes().decode() if path.exists() else ""
        if instance is None:
            written = f"[group:{name}]\n" not in text
        else:
            written = instance_conf(instance, node.settings, sys.executable, node.id) in text
        return not written or name in difference(node)


def replace(node: Node, group: str, kind: str) -> None:
    """Processes whose sections are as they were stay."""
    longest_secs = node.settings.graceful_shutdown_timeout_secs + REPLACE_GRACE_SECS
    if kind == "removed":
        node.supervisor.remove(group, longest_secs)
        return
    difference = node.supervisor.member_difference(group) if kind == "changed" else None
    if difference:
        node.supervisor.remove_members(group, [*difference.changed, *difference.removed], longest_secs)
    end_leftovers(node, group)
    if instance := node.state.read().instances.get(group):
        express.wait_until_released(node, group, [port for each in instance.generations for port in each.ports])
    if difference is None:
        node.supervisor.add(group)
        return
    for process in (*difference.changed, *difference.added):
        node.supervisor.add_member(group, process)


@contextmanager
def group_lock(node: Node, group: str, wait: bool) -> Iterator[bool]:
    """The right to stop, remove and add one group. Yields False when another has it and ``wait`` is false."""
    stripe = int(hashlib.sha256(group.encode()).hexdigest(), 16) % LOCK_STRIPES
    longest = node.settings.graceful_shutdown_timeout_secs + 2 * REPLACE_GRACE_SECS
    words = f'Another change of "{group}" takes longer than {longest} s: try again'
    taken = Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", words)
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(node.layout.group_lock(stripe), longest if wait else 0, taken))
        except Problem as problem:
            if wait or problem is not taken:
                raise
            yield False
        else:
            yield True


def end_leftovers(node: Node, group: str | None = None) -> list[str]:
    """End replicas that an earlier supervisord left behind, so that no replica ever has two processes.

    They are recognised by the marker in their environment, not by port: any program may have the port.
    group: None for all groups. Returns the markers of those that were ended.
    """
    prefix = f"{node.id}:{group}:" if group else f"{node.id}:"
    if not any(processes.marked(MARKER, prefix, except_under=())):  # as nearly always: supervisord is not even asked
        return []
    # What supervisord has started in this very moment is its child, too, and not in any list that was read before.
    return end_marked(node, prefix, {node.supervisor.pid()} if node.supervisor.answers() else ())


def set_stale_logs_aside(node: Node, of: str = "") -> None:
    """The logs of generations that are gone, where whoever ended them did not get to it. of: those of this instance,
    which there is no more, before another one has its name. Others with such names may be anybody's."""
    # In this order: who comes meanwhile is in the state before he has a log.
    names = [path.stem for path in Path(node.layout.log("x")).parent.glob(f"{of}*-*.log")]
    state = node.state.read()
    stems, instances = {each.stem for each in state.generations}, {of} if of else state.instances.keys()
    for name in names:
        stem, _, number = name.rpartition("-")
        if is_number(number) and stem not in stems and instance_of(stem) in instances:
            logs.set_aside(Path(node.layout.log(name)), Path(node.layout.deleted_logs))


def end_orphans(node: Node) -> None:
    """End what carries our marker and is no child of the supervisord that runs now."""
    end_marked(node, f"{node.id}:", {node.supervisor.pid()})


def end_marked(node: Node, prefix: str, except_under: Collection[int | None]) -> list[str]:
    leftovers = list(processes.marked(MARKER, prefix, except_under))
    processes.end([process for process, _ in leftovers], node.settings.graceful_shutdown_timeout_secs)
    for process, marker in leftovers:
        name = marker.split(":")[1]
        node.journal.record(Event.ORPHAN_ENDED, name, f'Left-over process {process.pid} of "{name}" ended')
    return [marker for _, marker in leftovers]
