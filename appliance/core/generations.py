"""Other specs for an instance that exists. Pure changes of the state.

verb          change
change        fields that need no new processes: nothing else
replace_spec  any fields: a new generation, with a launch of its own where the instance runs; the one before is kept
undo          back to that one, which is a replacement again
prove         a replica of the new generation has answered
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from appliance.core.instance import Gpu, InstanceSpec
from appliance.core.port_choice import Ports
from appliance.core.problems import Kind, Problem
from appliance.core.state import Previous, State, launched, refuse_taken_names, with_instance


def change(state: State, name: str, body: Any) -> State:
    """The state in which fields of an instance have other values, and its processes stay. Raises: Problem."""
    instance = state.get(name)
    spec = instance.spec.changed(body)
    refuse_taken_names(state, spec)
    return with_instance(state, replace(instance, spec=spec))


def replace_spec(state: State, name: str, spec: InstanceSpec, ports: Ports, placed: tuple[Gpu, ...]) -> State:
    """The state in which an instance has another spec, and new processes where it runs. The one before is kept."""
    before = state.get(name)
    refuse_taken_names(state, spec)
    after = launched(before) if before.wanted == "running" else before
    previous = Previous(before.spec, before.ports, before.prometheus_ports, before.placed)
    return with_instance(
        state,
        replace(
            after,
            spec=spec,
            ports=ports.ports,
            prometheus_ports=ports.prometheus_ports,
            placed=placed,
            generation=before.generation + 1,
            previous=previous,
            unproved=True,
        ),
    )


def undo(state: State, name: str) -> State:
    """The state in which an instance is what it was before its spec was replaced; another undo goes forth again.

    Raises: Problem NOTHING_TO_UNDO.
    """
    instance = state.get(name)
    if (back := instance.previous) is None:
        raise Problem(Kind.CONFLICT, "NOTHING_TO_UNDO", f'Instance "{name}" was not replaced: there is nothing to undo')
    return replace_spec(state, name, back.spec, Ports(back.ports, back.prometheus_ports), back.placed)


def fall_back(state: State, name: str, launch: int) -> State:
    """As undo, of a generation of which no replica has answered. What comes back counts as proved."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or not instance.unproved or instance.previous is None:
        return state
    after = undo(state, name)
    return with_instance(after, replace(after.get(name), unproved=False))


def prove(state: State, name: str, launch: int) -> State:
    """A replica of this launch has answered."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or not instance.unproved:
        return state
    return with_instance(state, replace(instance, unproved=False))
