"""Restarts: all replicas at once, or one after the other, so that the others answer meanwhile.

A rolling restart is decided by the verb, which writes into the state what is left of it; the monitor takes its steps.
"""

from __future__ import annotations

from functools import partial

from appliance.core import rolling as core_rolling
from appliance.core import state
from appliance.core.events import Cause, Event
from appliance.core.state import Instance
from appliance.core.views import InstanceView
from appliance.node import overview
from appliance.node.context import Node
from appliance.operations import cluster, instances, repairs, room, supervision, supply


def restart(node: Node, name: str, rolling: bool | None = None) -> InstanceView:
    """Replace the processes of an instance by new ones; a stopped one is started.

    rolling: one after the other; None: where there are several. One that does not run, or whose ports or model are
    others now, is started as a whole.
    """
    if node.settings.is_cluster_head:
        return cluster.restart(node, name)
    node.supervisor.require()
    before = node.state.read().get(name)
    instances.refuse_changed_of(node, name)
    supply.supply(node, name)
    instances.leave_taken_ports(node, name)
    instance = node.state.read().get(name)
    rolling = instance.spec.replicas > 1 if rolling is None else rolling
    if rolling and instance.wanted == "running" and not instance.lacks_model and instance.ports == before.ports:
        if not instance.quarantined:
            return begin_rolling(node, instance)
        with room.made_for(node, instance):  # what is in quarantine holds none
            return begin_rolling(node, instance)
    with room.made_for(node, instance):
        change = node.state.update(partial(state.restart, name=name))
    node.journal.record(Event.RESTARTED, name, f'Instance "{name}" restarted', cause=Cause.ASKED)
    return instances.carried_out(node, change.after.get(name))


def begin_rolling(node: Node, instance: Instance) -> InstanceView:
    names = [instance.process(index) for index in range(instance.spec.replicas)]
    pids = {each.name: each.pid or 0 for each in node.supervisor.members(instance.name, names)}
    rolling = {index: pids.get(process, 0) for index, process in enumerate(names)}
    change = node.state.update(partial(core_rolling.roll, name=instance.name, launch=instance.launch, rolling=rolling))
    return overview.view_of(node, change.after.get(instance.name))


def stop_for_restart(node: Node, instance: Instance, replica: int) -> None:
    """Let one process end its calls and itself. Not while another change of the group is at work."""
    name = instance.name
    with supervision.group_lock(node, name, wait=False) as mine:
        if not mine or supervision.differs(node, name):
            return
        node.supervisor.stop(name, instance.process(replica))
        repairs.count_restart(node, instance)
    words = f'Replica {replica} of "{name}" restarted, beside the others'
    node.journal.record(Event.RESTARTED, name, words, replica=replica, cause=Cause.ASKED)


def note_restarted(node: Node, instance: Instance, replica: int) -> None:
    """A replica answers again: the next one follows, if there is one."""
    rolled = partial(core_rolling.rolled, name=instance.name, launch=instance.launch, replica=replica)
    after = node.state.update(rolled).after.instances.get(instance.name)
    if after is not None and after.launch == instance.launch and not after.rolling:
        words = f'All replicas of "{instance.name}" were restarted, one after the other'
        node.journal.record(Event.ROLLED, instance.name, words)


def give_up(node: Node, instance: Instance, replica: int) -> None:
    """What was not restarted keeps its process: the new one does not work."""
    left = sorted(instance.rolling.keys() - {replica})
    node.state.update(partial(core_rolling.roll, name=instance.name, launch=instance.launch, rolling={}))
    words = (
        f'The rolling restart of "{instance.name}" ends: replica {replica} does not come back; left as they are: {left}'
    )
    node.journal.record(Event.ROLL_ENDED, instance.name, words, replica=replica)
