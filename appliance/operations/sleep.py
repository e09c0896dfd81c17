"""Putting instances to sleep, and waking them. One that sleeps has no process and no memory; the next call wakes it."""

from __future__ import annotations

from functools import partial

from appliance.core import sleep as core_sleep
from appliance.core.cluster import one_machine_only
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem
from appliance.core.routing import stopped
from appliance.core.views import InstanceView
from appliance.node import overview
from appliance.node.context import Node
from appliance.operations import instances, room, supervision, supply


def sleep(node: Node, name: str) -> InstanceView:
    """End the processes of an instance until it is called. Raises: Problem NOT_RUNNING when it is stopped."""
    if node.settings.is_cluster_head:
        raise one_machine_only("To sleep", 'on a cluster an instance with "start" = "on_demand" does so by itself')
    node.supervisor.require()
    while True:  # unless it was that launch: another verb came between
        instance = node.state.read().get(name)
        if instance.sleeping:
            return overview.view_of(node, instance)
        if instance.wanted != "running":
            raise Problem(Kind.CONFLICT, "NOT_RUNNING", f'Instance "{name}" is stopped: only one that runs can sleep')
        if room.put_to_sleep(node, name, instance.launch, "as asked"):
            break
    return instances.carried_out(node, node.state.read().get(name))


def sleep_idle(node: Node, name: str, launch: int, idle_secs: float) -> None:
    """Put an instance to sleep that nobody has called for so long, unless it was started anew meanwhile."""
    if room.put_to_sleep(node, name, launch, f"after {idle_secs:.0f} s without a call"):
        supervision.reconcile(node, {name})


def wake(node: Node, name: str, since: float | None = None) -> InstanceView:
    """Let an instance run that sleeps; of one that runs nothing changes. It answers as soon as that is begun. since: as
    of `room.made_in_turn`.

    Raises: Problem NOT_RUNNING when it is stopped; NO_ROOM, INSUFFICIENT_MEMORY; those of a start.
    """
    if node.settings.is_cluster_head:
        raise one_machine_only("To wake", "on a cluster a call does so")
    node.supervisor.require()
    instance = node.state.read().get(name)
    if instance.wanted == "running":
        return overview.view_of(node, instance)
    if not instance.sleeping:
        raise stopped(name)
    # What cannot be started puts nobody to sleep.
    instances.refuse_changed_of(node, name)
    supply.supply(node, name)
    instances.leave_taken_ports(node, name)
    with room.made_in_turn(node, instance, since):
        change = node.state.update(partial(core_sleep.wake, name=name))
    after = change.after.get(name)
    if change.before.get(name).sleeping:
        node.journal.record(Event.WOKEN, name, f'Instance "{name}" wakes up')
    return instances.carried_out(node, after)
