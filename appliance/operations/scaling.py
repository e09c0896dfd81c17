"""More or fewer replicas for an instance; those that stay keep their processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core import generations, placement
from appliance.core.events import Event
from appliance.core.instance import CHANGEABLE, InstanceSpec
from appliance.core.port_choice import Ports, choose_ports_again
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.state import Instance, State, remove
from appliance.core.views import InstanceView
from appliance.node import gpus, overview
from appliance.node.context import Node
from appliance.operations import instances, room

FIELDS = {*CHANGEABLE, "replicas"}


def scale(node: Node, before: Instance, spec: InstanceSpec, dry_run: bool) -> InstanceView:
    """Give an instance more or fewer replicas. Raises: Problem, also where there is no room for more."""
    name, change = before.name, scaling(node, before, spec)
    after = change(node.state.read()).get(name)
    needs_room = after.wanted == "running" and spec.replicas > before.spec.replicas
    if dry_run:
        if needs_room:
            room.refuse_without(node, after)
        return overview.view_of(node, after)
    if needs_room:
        with room.made_for(node, after):
            changed = node.state.update(change)
    else:
        changed = node.state.update(change)
    fields = sorted(spec.differences(before.spec))
    node.journal.record(Event.CHANGED, name, f'Instance "{name}" changed: {", ".join(fields)}')
    view = instances.carried_out(node, changed.after.get(name))
    # Those that were stopped by hand may be all that is left.
    return instances.start(node, name) if after.wanted == "running" and view.status == "stopped" else view


def scaling(node: Node, before: Instance, spec: InstanceSpec) -> Callable[[State], State]:
    """The change, with what it has to know of the machine."""
    busy = instances.busy_ports(node, spec)
    occupancy = gpus.occupancy(node, node.state.read(), spec)

    def change(state: State) -> State:
        current = unchanged(state, before)
        ports = ports_again(node, state, current, spec, busy)
        refuse_moved(current, spec, ports)
        placed = current.placed[: spec.replicas]
        if more := spec.replicas - len(current.ports):
            further = replace(spec, replicas=max(0, more))
            placed += placement.place_beside(state.generations, further, occupancy) if more > 0 else ()
        return generations.scale(state, spec.name, spec, ports, placed)

    return change


def ports_again(node: Node, state: State, current: Instance, spec: InstanceSpec, busy: frozenset[int]) -> Ports:
    others = remove(state, current.name).taken_ports
    beside = [each for each in current.generations if each is not current]
    taken = others | {port: spec.name for each in beside for port in (*each.ports, *each.prometheus_ports)}
    now = Ports(current.ports, current.prometheus_ports)
    return choose_ports_again(now, current.spec, spec, taken, node.settings, busy)


def refuse_moved(current: Instance, spec: InstanceSpec, ports: Ports) -> None:
    """Raises: Problem PORT_CONFLICT where a replica that stays would need other ports than its process has."""
    for before, after in ((current.ports, ports.ports), (current.prometheus_ports, ports.prometheus_ports)):
        if moved := [port for port, now in zip(before, after, strict=False) if port != now]:
            words = f"Port {moved[0]} is in use by {quoted(spec.name)} itself, by a replica that keeps its process"
            raise invalid(f"{words}: choose another one first, for it or for what is added", "PORT_CONFLICT")


def unchanged(state: State, before: Instance) -> Instance:
    """The instance, of whose spec the new one was made. Raises: Problem CHANGED_MEANWHILE."""
    current = state.get(before.name)
    if current.spec != before.spec:
        words = f"{quoted(before.name)} was changed by somebody else at the same moment: look at it, and try again"
        raise Problem(Kind.CONFLICT, "CHANGED_MEANWHILE", words)
    return current
