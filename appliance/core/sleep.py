"""Instances that have no process until they are called. Pure changes of the state.

verb   change
sleep  wanted = stopped, and sleeping: the next call starts it
wake   as start, of one that sleeps
"""

from __future__ import annotations

from appliance.core.generations import drop
from appliance.core.state import State, alone, healed, launched, put_to_sleep, with_instance


def sleep(state: State, name: str, launch: int | None = None) -> State:
    """The state in which an instance that runs has no process until it is called. launch: nothing changes for another
    one than this."""
    instance = state.instances.get(name)
    if instance is None or instance.wanted != "running" or launch not in (None, instance.launch):
        return state
    return with_instance(state, put_to_sleep(healed(alone(instance))))


def sleep_on_demand(state: State) -> State:
    """At the start of the appliance those begin to sleep that run on demand only."""
    for instance in state.instances.values():
        if instance.spec.is_on_demand:
            if instance.successor:  # nobody has seen yet whether it goes together with what was called
                number, launch = instance.successor.generation, instance.successor.launch
                why = "the appliance was restarted before"
                words = f"Generation {number} did not take over, and this one goes on: {why}"
                state = drop(state, instance.name, launch, words)
            state = sleep(state, instance.name)
    return state


def wake(state: State, name: str) -> State:
    """The state in which an instance that slept runs; of one that does not sleep nothing changes."""
    instance = state.get(name)
    return with_instance(state, launched(instance)) if instance.sleeping else state
