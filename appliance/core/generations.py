"""Other specs for an instance that exists. Pure changes of the state.

Theory of operation. The generation of an instance that is called is the instance itself. Where there is room for two,
the next one starts beside it, on ports of its own, and takes over when it answers; the one before stays a while, for an
undo. Where there is not, the old processes end first, and calls wait; then the one before comes back if the new one
does not start.

    verb          change
    change        fields that need no new processes: nothing else
    scale         more or fewer replicas; those that stay keep their processes
    replace_spec  in place: a new generation, with a launch of its own where the instance runs; the one before is kept
    fall_back     in place: as undo, of a generation of which no replica has answered
    prove         a replica of the new generation has answered
    begin         beside: a successor with processes of its own
    take_over     beside: the successor is called from now on, and the one before is its predecessor
    drop          beside: a successor or a predecessor is not wanted any more
    undo          back to the one before, which is a replacement again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from appliance.core.instance import CHANGEABLE, Gpu, InstanceSpec
from appliance.core.port_choice import Ports
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import (
    Instance,
    Previous,
    State,
    in_place_of,
    launched,
    refuse_taken_names,
    with_instance,
)

STRATEGIES = BESIDE, IN_PLACE = "beside", "in_place"
Value = TypeVar("Value")


def change(state: State, name: str, body: Any) -> State:
    """The state in which fields of an instance have other values, and its processes stay. Raises: Problem."""
    instance = state.get(name)
    spec = instance.spec.changed(body)
    refuse_taken_names(state, spec)
    after = instance.successor
    if after is not None:  # of which other fields differ on purpose
        after = replace(after, spec=after.spec.changed(changes_at_once(instance, spec)))
    return with_instance(state, replace(instance, spec=spec, successor=after, previous=previous_with(instance, spec)))


def changes_at_once(instance: Instance, spec: InstanceSpec) -> dict[str, Any]:
    """The fields with other values in ``spec`` for which no process is started."""
    values = spec.mapping()
    return {field: values[field] for field in spec.differences(instance.spec) if field in CHANGEABLE}


def previous_with(instance: Instance, spec: InstanceSpec) -> Previous | None:
    """What comes back where this generation does not work, with what was changed at once since."""
    before = instance.previous
    if before is None or not instance.falls_back:
        return before
    return replace(before, spec=before.spec.changed(changes_at_once(instance, spec)))


def scale(state: State, name: str, spec: InstanceSpec, ports: Ports, placed: tuple[Gpu, ...]) -> State:
    """The state in which an instance has more or fewer replicas. The first ones stay as they are.

    Raises: Problem REPLACEMENT_UNDER_WAY.
    """
    instance = state.get(name)
    refuse_under_way(instance)
    refuse_taken_names(state, spec)
    after = replace(
        instance,
        spec=spec,
        ports=ports.ports,
        prometheus_ports=ports.prometheus_ports,
        placed=placed,
        previous=previous_with(instance, spec),
    )
    return with_instance(
        state,
        replace(
            after,
            ejected=below(spec.replicas, instance.ejected),
            quarantined=below(spec.replicas, instance.quarantined),
            rolling=below(spec.replicas, instance.rolling),
        ),
    )


def below(replicas: int, by_replica: Mapping[int, Value]) -> dict[int, Value]:
    return {replica: value for replica, value in by_replica.items() if replica < replicas}


def replace_spec(state: State, name: str, spec: InstanceSpec, ports: Ports, placed: tuple[Gpu, ...]) -> State:
    """The state in which an instance has another spec, and new processes where it runs. The one before is kept; of
    those in a row of which no replica has answered, the one before them all.

    Raises: Problem REPLACEMENT_UNDER_WAY.
    """
    before = state.get(name)
    refuse_under_way(before)
    refuse_taken_names(state, spec)
    after = launched(before) if before.wanted == "running" else before
    return with_instance(
        state,
        replace(
            after,
            spec=spec,
            ports=ports.ports,
            prometheus_ports=ports.prometheus_ports,
            placed=placed,
            generation=before.generation + 1,
            previous=before.previous if has_never_answered(before) else Previous.of(before),
            predecessor=None,
            unproved=True,
            setback="",
            lacks_model=False,  # nobody replaces a spec by one whose model is not here
        ),
    )


def has_never_answered(before: Instance) -> bool:
    """Whether a generation that is replaced is none to go back to. One that an undo has brought back had answered."""
    return before.falls_back and before.previous is not None and not before.previous.undone


def begin(
    state: State, name: str, spec: InstanceSpec, ports: Ports, placed: tuple[Gpu, ...], must_agree: bool
) -> State:
    """The state in which the next generation of an instance that runs starts beside it. A predecessor has to go for it.

    must_agree: it takes over only if it answers the golden texts as the one that is called.
    Raises: Problem REPLACEMENT_UNDER_WAY.
    """
    instance = state.get(name)
    refuse_under_way(instance)
    refuse_taken_names(state, spec)
    successor = Instance(
        spec,
        ports.ports,
        ports.prometheus_ports,
        created_at=instance.created_at,
        launch=instance.next_launch,
        placed=placed,
        generation=instance.generation + 1,
        series=instance.next_launch,
        unproved=True,
        must_agree=must_agree,
    )
    begun = replace(instance, successor=successor, predecessor=None, setback="", launches=successor.launch)
    return with_instance(state, begun)


def hindrance(before: Instance, spec: InstanceSpec) -> str:
    """Why another generation of an instance cannot start beside it; empty where nothing of itself is against it."""
    if before.wanted != "running":
        return "it does not run"
    if before.lacks_model:
        return "its model is not here yet, so nothing of it runs"
    if before.unproved:
        return "its present generation has not answered yet"
    own = {*before.ports, *before.prometheus_ports}
    for first in (spec.port, spec.asked_prometheus_port):
        taken = own.intersection(range(first, first + spec.replicas)) if first is not None else ()
        if taken:
            return f"both would need port {min(taken)}, which was asked for"
    return ""


def refuse_under_way(instance: Instance) -> None:
    """Raises: Problem REPLACEMENT_UNDER_WAY."""
    if instance.successor:
        words = (
            f"Generation {instance.successor.generation} of {quoted(instance.name)} is just starting beside the one "
            f"that is called: wait until it has taken over, or give it up (POST /instances/{instance.name}/undo)"
        )
        raise Problem(Kind.CONFLICT, "REPLACEMENT_UNDER_WAY", words)


def take_over(state: State, name: str, launch: int, kept_until: float) -> State:
    """The state in which the successor with this launch is called. kept_until: as in `Instance`, of the one before."""
    instance = state.instances.get(name)
    if instance is None or instance.successor is None or instance.successor.launch != launch:
        return state
    return with_instance(state, exchanged(instance, instance.successor, kept_until))


def exchanged(instance: Instance, other: Instance, kept_until: float) -> Instance:
    """The other generation in the place of the one that is called so far, which becomes its predecessor."""
    kept = replace(
        instance, successor=None, predecessor=None, previous=None, rolling={}, setback="", unproved=False, extra={}
    )
    return replace(in_place_of(instance, other), unproved=False, predecessor=replace(kept, kept_until=kept_until))


def drop(state: State, name: str, launch: int, setback: str = "") -> State:
    """The state without that successor or predecessor. setback: why a successor does not take over."""
    instance = state.instances.get(name)
    if instance is None:
        return state
    if instance.successor and instance.successor.launch == launch:
        return with_instance(state, replace(instance.with_launches_kept, successor=None, setback=setback))
    if instance.predecessor and instance.predecessor.launch == launch:
        return with_instance(state, replace(instance.with_launches_kept, predecessor=None))
    return state


def undo(state: State, name: str, kept_until: float = 0.0, ports: Ports | None = None) -> State:
    """The state in which an instance is what it was before its spec was replaced; another undo goes forth again. Where
    the processes of before are there no more, new ones are started in place. ports: of these; None: as before.

    Raises: Problem NOTHING_TO_UNDO, REPLACEMENT_UNDER_WAY.
    """
    instance = state.get(name)
    refuse_under_way(instance)
    if (back := instance.previous) is None:
        raise Problem(Kind.CONFLICT, "NOTHING_TO_UNDO", f'Instance "{name}" was not replaced: there is nothing to undo')
    if (kept := instance.predecessor) is None or instance.wanted != "running":
        had = Ports(back.ports, back.prometheus_ports)
        after = replace_spec(state, name, back.spec, ports or had, back.placed)
        left = replace(Previous.of(instance), undone=not back.undone)  # the next undo goes forth again
        return with_instance(after, replace(after.get(name), previous=left))
    refuse_taken_names(state, kept.spec)
    exchange = exchanged(instance, kept, kept_until)
    # A batch that has seen both has to notice it.
    return with_instance(state, replace(exchange, generation=instance.generation + 1))


def fall_back(state: State, name: str, launch: int, why: str) -> State:
    """As undo, of a generation of which no replica has answered. What comes back counts as proved. why: what was wrong
    with the other."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or not instance.unproved or instance.previous is None:
        return state
    after = undo(state, name)
    words = f"Generation {instance.generation} did not work, and the one before is back: {why}"
    return with_instance(after, replace(after.get(name), unproved=False, setback=words))


def prove(state: State, name: str, launch: int) -> State:
    """A replica of this launch has answered."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or not instance.unproved:
        return state
    return with_instance(state, replace(instance, unproved=False))


def without_predecessors(state: State) -> State:
    """At the start of the appliance no undo is worth the load of a model."""
    for instance in state.instances.values():
        if instance.predecessor:
            state = with_instance(state, replace(instance.with_launches_kept, predecessor=None))
    return state
