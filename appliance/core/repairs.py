"""What the monitor decides about single replicas. Pure changes of the state.

What it saw of a launch says nothing of another one: then nothing changes.

verb           change
eject          a replica gets no traffic; readmit ends that
quarantine     a replica shall not run until start, restart or lift
count_restart  one more process in the place of another, by the monitor or by supervisord itself
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.core.state import Instance, State, with_generation


def eject(state: State, name: str, replica: int, launch: int, reason: str) -> State:
    def change(instance: Instance) -> Instance:
        if replica >= instance.spec.replicas:  # it went meanwhile
            return instance
        return replace(instance, ejected={**instance.ejected, replica: instance.ejected.get(replica, reason)})

    return with_generation(state, name, launch, change)


def readmit(state: State, name: str, replica: int, launch: int) -> State:
    def change(instance: Instance) -> Instance:
        return replace(instance, ejected=without(instance.ejected, replica))

    return with_generation(state, name, launch, change)


def quarantine(state: State, name: str, replica: int, launch: int, reason: str) -> State:
    def change(instance: Instance) -> Instance:
        if replica >= instance.spec.replicas:
            return instance
        quarantined = {**instance.quarantined, replica: instance.quarantined.get(replica, reason)}
        return replace(instance, quarantined=quarantined, ejected=without(instance.ejected, replica))

    return with_generation(state, name, launch, change)


def count_restart(state: State, name: str, launch: int) -> State:
    def change(instance: Instance) -> Instance:
        return replace(instance, restarts=instance.restarts + 1)

    return with_generation(state, name, launch, change)


def without(reasons: Mapping[int, str], replica: int) -> Mapping[int, str]:
    return {key: reason for key, reason in reasons.items() if key != replica}
