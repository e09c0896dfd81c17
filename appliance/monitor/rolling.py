"""Rolling restarts: the steps that `core.rolling` decides on, one at each look."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from appliance.core.health import Look, Record
from appliance.core.problems import Problem
from appliance.core.rolling import Seen, Step, next_replica, next_step
from appliance.core.state import Instance
from appliance.monitor.probing import ReplicaKey
from appliance.node.context import Node
from appliance.operations import repairs, restarts

log = logging.getLogger(__name__)


class Watched(NamedTuple):
    """A replica at the last look at everything."""

    instance: Instance
    look: Look


def advance_all(
    node: Node,
    rolling: Sequence[Instance],
    watched: Mapping[ReplicaKey, Watched],
    records: Mapping[ReplicaKey, Record],
) -> None:
    """Take the next step of each rolling restart, as far as its replicas were looked at since it was asked for."""
    for instance in rolling:
        if replicas := seen_of(instance, watched, records):
            advance(node, instance, replicas)


def seen_of(
    instance: Instance, watched: Mapping[ReplicaKey, Watched], records: Mapping[ReplicaKey, Record]
) -> dict[int, Seen]:
    """All replicas of a generation; none where they were not looked at since it became what it is."""
    keys = [ReplicaKey(instance.stem, index) for index in range(instance.spec.replicas)]
    if not all(key in watched and watched[key].instance == instance for key in keys):
        return {}
    return {key.replica: seen(watched[key].look, records[key]) for key in keys}


def seen(look: Look, record: Record) -> Seen:
    answers = record.ready and record.pid == look.pid and not record.misses and not look.ejected
    return Seen(look.state, look.pid, answers, look.quarantined, look.ejected)


def advance(node: Node, instance: Instance, replicas: Mapping[int, Seen]) -> None:
    """Take the next step of an instance's rolling restart. replicas: all of the instance, as they were just seen."""
    index = next_replica(instance.rolling, replicas)
    others = {each: replica for each, replica in replicas.items() if each != index}
    step = next_step(instance.rolling[index], replicas[index], others)
    steps: dict[Step, Callable[[], None]] = {
        Step.STOP: lambda: restarts.stop_for_restart(node, instance, index),
        Step.START: lambda: repairs.start_again(node, instance, index),
        Step.DONE: lambda: restarts.note_restarted(node, instance, index),
        Step.GIVE_UP: lambda: restarts.give_up(node, instance, index),
    }
    try:
        if step in steps:
            steps[step]()
    except Problem as problem:
        log.error('The rolling restart of "%s" waits: %s', instance.name, problem.message)
