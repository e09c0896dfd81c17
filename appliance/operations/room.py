"""Making room for an instance that is to start: idle ones that run on demand are put to sleep, where that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from appliance.core import room, state
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import Instance
from appliance.node.context import Node
from appliance.node.room import Rooms, is_limited
from appliance.operations import supervision

LONGEST_SECS = 60.0  # an operator's start waits so long for another one to have its room


@contextmanager
def made_for(node: Node, instance: Instance, wait_secs: float = LONGEST_SECS) -> Iterator[None]:
    """A block in which the state is changed so that an instance runs: there is room for it, and nobody takes that
    meanwhile. wait_secs: for others who make room.

    Raises: Problem NO_ROOM, INSUFFICIENT_MEMORY.
    """
    current = node.state.read().instances.get(instance.name)
    if not is_limited(node, instance) or (current and current.wanted == "running"):  # it has its room already
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
    """Put to sleep who has to give way, and wait until that has ended. Under the lock."""
    before = node.state.read()
    rooms = Rooms(node, before)
    demand, tenants = rooms.demand(instance), [each for each in rooms.tenants() if each.name != instance.name]
    names = room.evicted(instance.name, demand, rooms.free(tenants), tenants)
    for name in names:
        put_to_sleep(node, name, before.instances[name].launch, f"to make room for {quoted(instance.name)}")
    if names:
        supervision.reconcile(node, names)


def put_to_sleep(node: Node, name: str, launch: int, why: str) -> bool:
    """Let an instance sleep; its processes end with the next reconcile. Whether it was still that launch."""
    change = node.state.update(partial(state.sleep, name=name, launch=launch))
    instance = change.after.instances.get(name)
    if instance is None or not instance.sleeping or change.before.get(name).sleeping:
        return False
    node.journal.record(Event.SLEPT, name, f'Instance "{name}" sleeps from now on, {why}')
    return True
