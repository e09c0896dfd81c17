"""Another spec for an instance that exists: its model, its limits, its replicas.

Where there is room for two the next generation starts beside the one that is called, and takes over when it answers;
nobody waits. Else the old processes end first, and calls wait for the new ones, as during a restart. What would give
other vectors has to be said: an index that mixes vectors of two models is a fault that nobody notices. What does not
start changes nothing, or is taken back by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from appliance.core import generations, placement
from appliance.core.cluster import one_machine_only
from appliance.core.events import Event
from appliance.core.fields import required_object
from appliance.core.generations import BESIDE, IN_PLACE
from appliance.core.instance import CHANGEABLE, InstanceSpec
from appliance.core.port_choice import Ports, choose_ports, choose_ports_again
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.program import default_engine
from appliance.core.routing import space_of
from appliance.core.state import Instance, State, in_place_of, remove
from appliance.core.views import InstanceView, ReplacementView
from appliance.node import directory, gpus, overview
from appliance.node import room as rooms
from appliance.node.context import Node
from appliance.operations import cluster, instances, models, room, scaling, supervision, supply
from appliance.operations.scaling import unchanged

Change = Callable[[State], State]
DRAIN_SECS = 2.0  # at least so long the processes of before stay: callers hear of the others within a second


def set_fields(
    node: Node,
    name: str,
    body: Any,
    whole: bool,
    dry_run: bool = False,
    allow_incompatible: bool = False,
    strategy: str | None = None,
) -> InstanceView:
    """Give an instance other fields: those in ``body``, the others stay or, with ``whole``, have their defaults.

    dry_run: the same answers and refusals, and nothing changes. allow_incompatible: also where vectors become others.
    strategy: BESIDE or IN_PLACE; None: beside where there is room.
    """
    if node.settings.is_cluster_head:
        return cluster.set_fields(node, name, body, whole, dry_run)
    directory.refuse_listed(node.settings)
    node.supervisor.require()
    before = node.state.read().get(name)
    spec = asked(before.spec, body, whole)
    differences = spec.differences(before.spec)
    if differences <= set(CHANGEABLE):
        return instances.change(node, name, spec.mapping() if whole else body, dry_run)
    spec = instances.validated(node, spec.mapping())
    if differences <= scaling.FIELDS:
        return scaling.scale(node, before, spec, dry_run)
    refuse_incompatible(node, before.spec, spec, allow_incompatible or has_given_none(node, before))
    refuse_without_model(node, spec)
    return replace_by(node, before, spec, strategy, must_agree=not allow_incompatible, dry_run=dry_run)


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


def has_given_none(node: Node, instance: Instance) -> bool:
    """Whether it has never had its model, and so no vectors."""
    return instance.lacks_model and not Path(node.layout.golden, f"{instance.stem}.json").exists()


def refuse_without_model(node: Node, spec: InstanceSpec) -> None:
    """Calls would wait for its download. Raises: Problem MODEL_NOT_DOWNLOADED."""
    if supply.lacks_model(node, spec):
        raise Problem(
            Kind.PRECONDITION,
            "MODEL_NOT_DOWNLOADED",
            f"Model {quoted(spec.model_id)} is not on this machine: download it first (POST /models, then "
            "/models/ID/download), and callers wait for its load alone",
        )


def replace_by(
    node: Node,
    before: Instance,
    spec: InstanceSpec,
    strategy: str | None,
    must_agree: bool = False,
    dry_run: bool = False,
    in_place: Change | None = None,
) -> InstanceView:
    """Start another generation. in_place: the change for that strategy, where it is not the usual one."""
    beside = begin(node, before, spec, must_agree)
    chosen = IN_PLACE if strategy == IN_PLACE else strategy_for(node, before, spec, beside, strategy)
    change = beside if chosen == BESIDE else in_place or replacing(node, before, spec)
    after = change(node.state.read()).get(before.name)
    would_be = after.successor or after
    if dry_run:
        if after.wanted == "running":
            room.refuse_without(node, would_be)
        changes = tuple(sorted(spec.differences(before.spec)))
        plan = ReplacementView(chosen, would_be.generation, changes, rooms.needs_of(node, would_be))
        view = overview.view_of(node, in_place_of(before, would_be) if after.successor else after)
        return replace(view, replacement=plan)
    with room.made_for(node, would_be) if after.wanted == "running" else nullcontext(), models.files_held(node):
        refuse_without_model(node, would_be.spec)  # making room took its time
        changed = node.state.update(change)
    record(node, changed.before.get(before.name), changed.after.get(before.name))
    return instances.carried_out(node, changed.after.get(before.name))


def strategy_for(node: Node, before: Instance, spec: InstanceSpec, beside: Change, wished: str | None) -> str:
    """BESIDE where nothing speaks against it, or where it is wished and possible. Raises: Problem where it is not."""
    generations.refuse_under_way(before)
    why, problem = generations.hindrance(before, spec), None
    if not why:
        try:
            successor = beside(node.state.read()).get(before.name).successor
            assert successor is not None
            room.refuse_without(node, successor)
            why = "" if wished else rooms.hindrance(node, successor, before.predecessor)
        except Problem as refused:  # of ports, of GPUs, of room
            why, problem = refused.message, refused
    if not why:
        return BESIDE
    if not wished:
        return IN_PLACE
    raise problem or Problem(
        Kind.CONFLICT,
        "CANNOT_START_BESIDE",
        f"No other generation of {quoted(before.name)} can start beside the one that is called: {why}. Say "
        f"strategy={IN_PLACE}, and calls wait for the new processes",
    )


def begin(node: Node, before: Instance, spec: InstanceSpec, must_agree: bool) -> Change:
    """The change to a successor beside the generation that is called, with what it has to know of the machine."""
    busy = instances.busy_ports(node, spec)
    occupancy = gpus.occupancy(node, node.state.read(), spec)

    def change(state: State) -> State:
        current = unchanged(state, before)
        taken = remove(state, spec.name).taken_ports
        taken |= dict.fromkeys(ports_of(current), spec.name)
        ports = choose_ports(taken, spec, node.settings, busy - ports_of(current.predecessor))
        placed = placement.place_beside(state.generations, spec, occupancy)
        return generations.begin(state, spec.name, spec, ports, placed, must_agree)

    return change


def replacing(node: Node, before: Instance, spec: InstanceSpec) -> Change:
    """The change in place, with what it has to know of the machine."""
    busy = instances.busy_ports(node, spec)
    occupancy = gpus.occupancy(node, node.state.read(), spec)

    def change(state: State) -> State:
        current = unchanged(state, before)
        others = remove(state, spec.name)
        now = Ports(current.ports, current.prometheus_ports)
        free = busy - ports_of(current.predecessor)
        ports = choose_ports_again(now, current.spec, spec, others.taken_ports, node.settings, free)
        same = placement.workload(current.spec) == placement.workload(spec)
        stays = same and (current.spec.gpu_ids, current.spec.replicas) == (spec.gpu_ids, spec.replicas)
        placed = current.placed
        if not stays:
            left = placement.without(occupancy, current.generations)  # which end before the new ones start
            placed = placement.place_beside(others.generations, spec, left)
        return generations.replace_spec(state, spec.name, spec, ports, placed)

    return change


def ports_of(generation: Instance | None) -> frozenset[int]:
    return frozenset((*generation.ports, *generation.prometheus_ports) if generation else ())


def record(node: Node, before: Instance, after: Instance) -> None:
    name, other = before.name, after.successor or after
    fields = ", ".join(sorted(other.spec.differences(before.spec)))
    if after.successor:
        words = f'Generation {other.generation} of "{name}" starts beside the one that is called: {fields}'
        node.journal.record(Event.REPLACING, name, words, generation=other.generation)
    else:
        words = f'Instance "{name}" replaced, generation {other.generation}: {fields}'
        node.journal.record(Event.REPLACED, name, words, generation=other.generation)


def undo(node: Node, name: str, strategy: str | None = None) -> InstanceView:
    """Give up the generation that is starting; else back to what the instance was before, at once where its processes
    are still there. Raises: Problem NOTHING_TO_UNDO, and those of a start."""
    if node.settings.is_cluster_head:
        raise one_machine_only("An undo", "change the fields back")
    node.supervisor.require()
    before = node.state.read().get(name)
    if before.successor:
        gone = give_up(node, before.successor, "it was given up, as asked")
        if gone or node.state.read().get(name).launch != before.successor.launch:  # by us, or by somebody else
            return overview.show(node, name)
        return undo(node, name, strategy)  # it has taken over in this moment
    change = partial(generations.undo, name=name, kept_until=time.time() + kept_secs(before))
    back = change(node.state.read()).get(name)
    if back.predecessor and answers(node, before.predecessor):
        changed = node.state.update(change)
        record(node, changed.before.get(name), changed.after.get(name))
        return instances.carried_out(node, changed.after.get(name))
    if before.predecessor:  # nothing of it runs, so it is of no use
        let_go(node, before.predecessor, "because none of its replicas answers")
        change = partial(generations.undo, name=name)
        before = node.state.read().get(name)
        back = change(node.state.read()).get(name)
    instances.validated(node, back.spec.mapping())
    refuse_without_model(node, back.spec)
    return replace_by(node, before, back.spec, strategy, in_place=undoing(node, before, back.spec))


def undoing(node: Node, before: Instance, spec: InstanceSpec) -> Change:
    """The undo in place. Another instance may have the ports of then by now."""
    busy = instances.busy_ports(node, spec)

    def change(state: State) -> State:
        current = state.get(before.name)
        others = remove(state, before.name).taken_ports
        back = current.previous
        had = {*back.ports, *back.prometheus_ports} if back else set()
        if not had & {*others, *(busy - ports_of(current))}:
            return generations.undo(state, before.name)
        now = Ports(current.ports, current.prometheus_ports)
        ports = choose_ports_again(now, current.spec, spec, others, node.settings, busy)
        return generations.undo(state, before.name, ports=ports)

    return change


def answers(node: Node, generation: Instance | None) -> bool:
    """Whether one of its replicas does: the others may be on their way."""
    if generation is None or generation.ejected or generation.quarantined:
        return False
    sight = overview.look_at(node, node.state.read().get(generation.name))
    return any(each.answers for each in overview.sighting_of(node, generation, sight).replicas)


def kept_secs(instance: Instance) -> float:
    return max(DRAIN_SECS, instance.spec.undo_secs)


# -- what the monitor does --------------------------------------------------------------------------------------------


def take_over(node: Node, instance: Instance, successor: Instance, has_answered: bool) -> None:
    """The successor answers: it is called from now on, and an undo finds the one before ready for a while, if that has
    ever answered."""
    kept_until = time.time() + (kept_secs(successor) if has_answered else 0)
    change = partial(generations.take_over, name=instance.name, launch=successor.launch, kept_until=kept_until)
    changed = node.state.update(change)
    if changed.after != changed.before:
        record(node, changed.before.get(instance.name), changed.after.get(instance.name))


def give_up(node: Node, successor: Instance, reason: str) -> bool:
    """A successor does not take over: its processes end, and the generation that is called goes on. Whether it was
    one still."""
    name = successor.name
    setback = f"Generation {successor.generation} did not take over, and this one goes on: {reason}"
    changed = node.state.update(partial(generations.drop, name=name, launch=successor.launch, setback=setback))
    if changed.after == changed.before or name not in changed.after.instances:
        return False
    words = f'"{name}" stays what it is; generation {successor.generation} does not take over: {reason}'
    node.journal.record(Event.FELL_BACK, name, words, generation=changed.after.get(name).generation)
    end_processes(node, successor)
    return True


def let_go(node: Node, predecessor: Instance, why: str) -> None:
    """The processes end that an undo would have found ready."""
    if room.release(node, predecessor, why):
        end_processes(node, predecessor)


def end_processes(node: Node, generation: Instance) -> None:
    """Of one that was dropped; its logs are set aside as those of a deleted instance."""
    name = generation.name
    supervision.reconcile(node, {name})
    with supervision.group_lock(node, name, wait=True):
        if generation.stem not in {each.stem for each in node.state.read().generations}:
            node.set_logs_aside(generation)


def fall_back(node: Node, name: str, launch: int, reason: str) -> None:
    """The generation that has just begun in place does not work: the one before comes back, once."""
    change = node.state.update(partial(generations.fall_back, name=name, launch=launch, why=reason))
    after = change.after.instances.get(name)
    if after is None or after.launch == launch or not change.before.get(name).unproved:
        return
    words = f'Instance "{name}" is again what it was before it was replaced: {reason}'
    node.journal.record(Event.FELL_BACK, name, words, generation=after.generation)
    instances.carried_out(node, after)
