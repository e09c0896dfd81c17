"""Making room for an instance that is to start: idle ones that run on demand are put to sleep, where that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from appliance.core import room, state
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import Instance, State
from appliance.node.context import Node
from appliance.node.room import Rooms, is_limited
from appliance.operations import supervision

MOST_ROUNDS = 5
LONGEST_SECS = 60.0  # an operator's start waits so long for another one to have its room


@contextmanager
def made_for(node: Node, instance: Instance, wait_secs: float = LONGEST_SECS) -> Iterator[None]:
    """A block in which the state is changed so that an instance runs: there is room for it, and nobody takes that
    meanwhile. wait_secs: for others who make room.

    Raises: Problem NO_ROOM, INSUFFICIENT_MEMORY.
    """
    current = node.state.read().instances.get(instance.name)
    has_room = current is not None and current.wanted == "running" and current.spec == instance.spec
    if has_room or not is_limited(node, instance):
        yield
        return
    path = Path(node.layout.room_lock)
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path, timeout=wait_secs)
    try:
        lock.acquire()
    except Timeout:
        words = f"Room is being made for another instance than {quoted(instance.name)}: try again in a moment"
        raise Problem(Kind.UNAVAILABLE, "NO_ROOM", words) from None
    try:
        make(node, instance)
        yield
    finally:
        lock.release()


def make(node: Node, instance: Instance) -> None:
    """Put to sleep who has to give way, and wait until that has ended; look again, because somebody may have been
    launched anew meanwhile. Under the lock."""
    for _ in range(MOST_ROUNDS):
        before = node.state.read()
        names = giving_way(node, before, instance)
        if not names:
            return
        for name in names:
            put_to_sleep(node, name, before.instances[name].launch, f"to make room for {quoted(instance.name)}")
        supervision.reconcile(node, names)
    raise Problem(Kind.UNAVAILABLE, "NO_ROOM", f"No room for {quoted(instance.name)}: others start again and again")


def refuse_without(node: Node, instance: Instance) -> None:
    """Raises: Problem where there is no room for an instance, and none can be made."""
    if is_limited(node, instance):
        giving_way(node, node.state.read(), instance)


def giving_way(node: Node, before: State, instance: Instance) -> tuple[str, ...]:
    """Who has to sleep so that the instance can start. Raises: Problem."""
    rooms = Rooms(node, before)
    tenants = rooms.tenants()
    others = [each for each in tenants if each.name != instance.name]
    free = rooms.free(others)
    for own in tenants:
        if own.name == instance.name:  # what it has of a GPU the driver does not call free
            free = room.with_what_leaves(free, [replace(own, takes=without_host(own.takes))])
    return room.evicted(instance.name, rooms.demand(instance), free, others)


def without_host(takes: room.Amounts) -> room.Amounts:
    return {place: taken for place, taken in takes.items() if place != room.HOST}


def put_to_sleep(node: Node, name: str, launch: int, why: str) -> bool:
    """Let an instance sleep; its processes end with the next reconcile. Whether it was still that launch."""
    change = node.state.update(partial(state.sleep, name=name, launch=launch))
    instance = change.after.instances.get(name)
    if instance is None or not instance.sleeping or change.before.get(name).sleeping:
        return False
    node.journal.record(Event.SLEPT, name, f'Instance "{name}" sleeps from now on, {why}')
    return True
