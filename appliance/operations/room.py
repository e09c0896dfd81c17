"""Making room for an instance that is to start: idle ones that run on demand are put to sleep, where that is needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from filelock import Timeout

from appliance.core import generations, room, sleep
from appliance.core.events import Event
from appliance.core.layout import instance_of
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import Instance, State
from appliance.drivers.processes import memory_available
from appliance.node.context import Node
from appliance.node.room import Rooms, is_limited, keep_peaks, needs_of
from appliance.operations import supervision

log = logging.getLogger(__name__)
MOST_ROUNDS = 5
SHOWN_SECS, POLL_SECS = 2.0, 0.1
LONGEST_SECS = 60.0  # an operator's start waits so long for another one to have its room
TURN_SECS = 1.0  # whoever asks for a call asks again: a thread of control must not wait for long


@contextmanager
def made_in_turn(node: Node, instance: Instance, since: float | None) -> Iterator[None]:
    """As `made_for`, for a call: it asks again while there is no room, and comes after those who wait longer. since: as
    of `WaitingLine.note`."""
    waits = False
    node.line.note(instance.name, since, time.monotonic())
    try:
        with made_for(node, instance, in_turn=True):
            yield
    except Problem as problem:
        waits = problem.code == "NO_ROOM"
        raise
    finally:
        if waits:
            node.line.note(instance.name, since, time.monotonic())
        else:
            node.line.leave(instance.name)


@contextmanager
def made_for(node: Node, instance: Instance, in_turn: bool = False) -> Iterator[None]:
    """A block in which the state is changed so that an instance runs: there is room for it, and nobody takes that
    meanwhile. in_turn: those who came before it in the line for room come first; an operator waits for nobody there.

    Raises: Problem NO_ROOM, INSUFFICIENT_MEMORY.
    """
    current = node.state.read().instances.get(instance.name)
    has_room = (
        current is not None
        and current.wanted == "running"
        and current.spec == instance.spec
        and not current.quarantined  # of that nothing runs
    )
    if has_room or not is_limited(node, instance):
        if not has_room:
            release_for(node, instance)
        yield
        return
    words = f"Room is being made for another instance than {quoted(instance.name)}: try again in a moment"
    taken = Problem(Kind.UNAVAILABLE, "NO_ROOM", words)
    with supervision.file_lock(node.layout.room_lock, TURN_SECS if in_turn else LONGEST_SECS, taken):
        make(node, instance, node.line.ahead_of(instance.name, time.monotonic()) if in_turn else ())
        yield


def make(node: Node, instance: Instance, first: Collection[str]) -> None:
    """Put to sleep who has to give way, and wait until that has ended; look again, because somebody may have been
    launched anew meanwhile. first: who came before. Under the lock."""
    for _ in range(MOST_ROUNDS):
        before = node.state.read()
        names = giving_way(node, before, instance, first)
        if not names:
            return
        keep_peaks_of(node, before, names)
        for stem in names:
            give_way(node, before, stem, f"to make room for {quoted(instance.name)}")
        supervision.reconcile(node, {instance_of(stem) for stem in names})
        wait_until_shown(node, instance, first)
    raise Problem(Kind.UNAVAILABLE, "NO_ROOM", f"No room for {quoted(instance.name)}: others start again and again")


def keep_peaks_of(node: Node, before: State, stems: Collection[str]) -> None:
    """What those take who give way: where instances take turns quickly the monitor may never see one that has loaded
    its model, and what is not known is estimated."""
    table, listening = node.supervisor.processes(), node.listening()
    proved = {
        each.process(replica)
        for each in before.generations
        if each.stem in stems
        for replica in range(each.spec.replicas)
        if node.proved(each, replica, listening)
    }
    answering = {each.pid for each in table if each.name in proved and each.pid}
    try:
        keep_peaks(node, before, table, answering)
    except (OSError, Timeout) as error:
        log.error("Cannot keep what models take: %s", error)


def wait_until_shown(node: Node, instance: Instance, first: Collection[str]) -> None:
    """Until the room is there that was made. A GPU's driver may say so a moment late, for which nobody should go."""
    until = time.monotonic() + SHOWN_SECS
    while time.monotonic() < until:
        try:
            if not giving_way(node, node.state.read(), instance, first):
                return
        except Problem:  # so it seems as yet
            pass
        time.sleep(POLL_SECS)


def release_for(node: Node, instance: Instance) -> None:
    """Where nothing is limited, and the machine has not so much memory: what is kept for an undo goes."""
    kept = [each.predecessor for each in node.state.read().instances.values() if each.predecessor]
    if kept and needs_of(node, instance)[room.HOST] > memory_available():
        for each in kept:
            release(node, each, f"to make room for {quoted(instance.name)}")
        supervision.reconcile(node, {each.name for each in kept})


def refuse_without(node: Node, instance: Instance) -> None:
    """Raises: Problem where there is no room for an instance, and none can be made."""
    if is_limited(node, instance):
        giving_way(node, node.state.read(), instance)


def giving_way(node: Node, before: State, instance: Instance, first: Collection[str] = ()) -> tuple[str, ...]:
    """The stems of those who have to go so that the instance can start. first: who came before it. Raises: Problem."""
    rooms = Rooms(node, before)
    tenants = rooms.tenants()
    leaving = {each.stem for each in ending_for(before, instance)}
    others = [each for each in tenants if each.name not in leaving]
    free = rooms.free(others)
    for own in tenants:
        if own.name in leaving:  # what it has of a GPU the driver does not call free
            free = room.with_what_leaves(free, [replace(own, takes=without_host(own.takes))])
    ahead = [rooms.demand(each) for name in first if (each := before.instances.get(name)) and each.sleeping]
    return room.evicted(instance.name, rooms.demand(instance), free, others, ahead)


def ending_for(before: State, instance: Instance) -> tuple[Instance, ...]:
    """The generations of the same instance whose processes end before those of this one start, or are its own."""
    current = before.instances.get(instance.name)
    if current is None:
        return ()
    own = current if current.series == instance.series else None  # else it starts beside that
    dropped = current.predecessor if instance.predecessor is None else None
    return tuple(each for each in (own, dropped) if each)


def give_way(node: Node, before: State, stem: str, why: str) -> None:
    """Let an instance sleep, or let go what is kept for an undo; its processes end with the next reconcile."""
    instance = next(each for each in before.generations if each.stem == stem)
    if instance is before.get(instance.name):
        put_to_sleep(node, instance.name, instance.launch, why)
    else:
        release(node, instance, why)


def release(node: Node, predecessor: Instance, why: str) -> bool:
    """An undo finds what the instance was before ready no more; its processes end with the next reconcile. Whether it
    was still there."""
    name = predecessor.name
    change = node.state.update(partial(generations.drop, name=name, launch=predecessor.launch))
    if change.after == change.before:
        return False
    words = f'What "{name}" was before ends its processes, {why}; an undo starts them anew'
    node.journal.record(Event.RELEASED, name, words)
    return True


def without_host(takes: room.Amounts) -> room.Amounts:
    return {place: taken for place, taken in takes.items() if place != room.HOST}


def put_to_sleep(node: Node, name: str, launch: int, why: str) -> bool:
    """Let an instance sleep; its processes end with the next reconcile. Whether it was still that launch."""
    change = node.state.update(partial(sleep.sleep, name=name, launch=launch))
    instance = change.after.instances.get(name)
    if instance is None or not instance.sleeping or change.before.get(name).sleeping:
        return False
    node.journal.record(Event.SLEPT, name, f'Instance "{name}" sleeps from now on, {why}')
    return True
