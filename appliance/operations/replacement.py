"""Another spec for an instance that exists: its model, its limits, its replicas.

The old processes end first, and calls wait for the new ones, as during a restart. What would give other vectors has to
be said: an index that mixes vectors of two models is a fault that nobody notices. Where no replica of the new
generation comes up, the one before comes back by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from appliance.core import generations, placement
from appliance.core.events import Event
from appliance.core.fields import required_object
from appliance.core.instance import CHANGEABLE, InstanceSpec
from appliance.core.port_choice import Ports, choose_ports_again
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.program import default_engine
from appliance.core.routing import space_of
from appliance.core.state import Instance, State, remove
from appliance.core.views import InstanceView
from appliance.node import directory, gpus, overview
from appliance.node.context import Node
from appliance.operations import instances, room, supply

Change = Callable[[State], State]


def set_fields(
    node: Node, name: str, body: Any, whole: bool, dry_run: bool = False, allow_incompatible: bool = False
) -> InstanceView:
    """Give an instance other fields: those in ``body``, the others stay or, with ``whole``, have their defaults.

    dry_run: the same answers and refusals, and nothing changes. allow_incompatible: also where vectors become others.
    """
    directory.refuse_listed(node.settings)
    node.supervisor.require()
    before = node.state.read().get(name)
    spec = asked(before.spec, body, whole)
    if spec.differences(before.spec) <= set(CHANGEABLE):
        return instances.change(node, name, spec.mapping() if whole else body, dry_run)
    spec = instances.validated(node, spec.mapping())
    refuse_incompatible(node, before.spec, spec, allow_incompatible)
    refuse_without_model(node, spec)
    return carry_out(node, name, replacing(node, before, spec), dry_run)


def asked(before: InstanceSpec, body: Any, whole: bool) -> InstanceSpec:
    given = required_object(body, "An instance must be an object with its fields")
    spec = InstanceSpec.parse({"name": before.name, **given} if whole else {**before.mapping(), **given})
    if spec.name != before.name:
        raise invalid(f"An instance keeps its name ({quoted(before.name)}): create another one, or give it an alias")
    return spec


def refuse_incompatible(node: Node, before: InstanceSpec, after: InstanceSpec, allowed: bool) -> None:
    """Raises: Problem INCOMPATIBLE where the vectors become others, unless that is allowed."""
    engine = default_engine(node.settings)
    both = zip(space_of(before, engine), space_of(after, engine), strict=True)
    other = [f"{name} {old} becomes {new}" for (name, old), (_, new) in both if old != new]
    if other and not allowed:
        raise Problem(
            Kind.CONFLICT,
            "INCOMPATIBLE",
            f"Vectors of {quoted(before.name)} would not go together with those that it has given so far: "
            f"{', '.join(other)}. Say allow_incompatible=true if no index mixes them",
        )


def refuse_without_model(node: Node, spec: InstanceSpec) -> None:
    """Calls would wait for its download. Raises: Problem MODEL_NOT_DOWNLOADED."""
    if supply.lacks_model(node, spec):
        raise Problem(
            Kind.PRECONDITION,
            "MODEL_NOT_DOWNLOADED",
            f"Model {quoted(spec.model_id)} is not on this machine: download it first (POST /models, then "
            "/models/ID/download), and callers wait for its load alone",
        )


def replacing(node: Node, before: Instance, spec: InstanceSpec) -> Change:
    """The change, with what it has to know of the machine."""
    busy = instances.busy_ports(node, spec)
    occupancy = gpus.occupancy(node, node.state.read(), spec)

    def change(state: State) -> State:
        current = state.get(spec.name)
        if current.spec != before.spec:  # of which the new one was made
            words = f"{quoted(spec.name)} was changed by somebody else at the same moment: look at it, and try again"
            raise Problem(Kind.CONFLICT, "CHANGED_MEANWHILE", words)
        others = remove(state, spec.name)
        now = Ports(current.ports, current.prometheus_ports)
        ports = choose_ports_again(now, current.spec, spec, others.taken_ports, node.settings, busy)
        same = placement.workload(current.spec) == placement.workload(spec)
        stays = same and (current.spec.gpu_ids, current.spec.replicas) == (spec.gpu_ids, spec.replicas)
        placed = current.placed
        if not stays:
            placed = placement.place_beside(others.instances.values(), spec, occupancy)
        return generations.replace_spec(state, spec.name, spec, ports, placed)

    return change


def carry_out(node: Node, name: str, change: Change, dry_run: bool = False) -> InstanceView:
    after = change(node.state.read()).get(name)
    if dry_run:
        return overview.view_of(node, after)
    if after.wanted == "running":
        with room.made_for(node, after):
            changed = node.state.update(change)
    else:
        changed = node.state.update(change)
    fields = sorted(changed.after.get(name).spec.differences(changed.before.get(name).spec))
    words = f'Instance "{name}" replaced, generation {after.generation}: {", ".join(fields)}'
    node.journal.record(Event.REPLACED, name, words, generation=after.generation)
    return instances.carried_out(node, changed.after.get(name))


def undo(node: Node, name: str) -> InstanceView:
    """Back to what the instance was before. Raises: Problem NOTHING_TO_UNDO, and those of a start."""
    node.supervisor.require()
    change = partial(generations.undo, name=name)
    spec = change(node.state.read()).get(name).spec
    instances.validated(node, spec.mapping())
    refuse_without_model(node, spec)
    return carry_out(node, name, change)


def fall_back(node: Node, name: str, launch: int, reason: str) -> None:
    """The generation that has just begun does not work: the one before comes back, once."""
    change = node.state.update(partial(generations.fall_back, name=name, launch=launch))
    after = change.after.instances.get(name)
    if after is None or after.launch == launch or not change.before.get(name).unproved:
        return
    words = f'Instance "{name}" is again what it was before it was replaced: {reason}'
    node.journal.record(Event.FELL_BACK, name, words, generation=after.generation)
    instances.carried_out(node, after)
