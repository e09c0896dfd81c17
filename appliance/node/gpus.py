"""GPUs and the replicas on them: what NVML shows, what the state has placed, and what a workload was seen to take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from appliance.core import placement
from appliance.core.instance import AUTO, Gpu, InstanceSpec
from appliance.core.layout import replica_of
from appliance.core.placement import UNMEASURED_BYTES, Device
from appliance.core.state import Instance, State
from appliance.core.status import ALIVE, Process
from appliance.drivers import nvml, processes
from appliance.node.context import Node

Replica = tuple[str, int]  # instance and number


def show(node: Node) -> list[dict[str, Any]]:
    """Every visible GPU with our replicas on it: those placed there, and those whose processes have memory there."""
    devices = nvml.devices()
    if not devices:
        return []
    used = memory(node.supervisor.processes())
    there: dict[int, dict[Replica, int | None]] = {device.index: {} for device in devices}
    for instance, index, device in placements(node.state.read().instances.values(), devices):
        there[device.index][instance.name, index] = None
    for (index, replica), taken in used.items():
        there.setdefault(index, {})[replica] = taken
    return [
        asdict(device)
        | {
            "replicas": [
                {"instance": name, "replica": index, "memory_used": taken}
                for (name, index), taken in sorted(there[device.index].items())
            ]
        }
        for device in devices
    ]


def placements(instances: Iterable[Instance], devices: Sequence[Device]) -> Iterable[tuple[Instance, int, Device]]:
    """Each replica that was given one of these GPUs."""
    for instance in instances:
        for index in range(instance.spec.replicas):
            gpu: Gpu | None = instance.gpu_of(index)
            device = placement.find(devices, gpu) if gpu is not None else None
            if device:
                yield instance, index, device


def memory(table: Sequence[Process]) -> dict[tuple[int, Replica], int]:
    """(GPU number, replica) -> bytes that its process and the children of that hold there."""
    owners = {
        process.pid: (process.group, replica)
        for process in table
        if process.pid and process.state in ALIVE
        if (replica := replica_of(process.group, process.name)) is not None
    }
    used: dict[tuple[int, Replica], int] = defaultdict(int)
    for index, pid, taken in nvml.memory_by_process():
        owner = next((owners[ancestor] for ancestor in processes.lineage(pid) if ancestor in owners), None)
        if owner:
            used[index, owner] += taken
    return used


def peaks(state: State, table: Sequence[Process]) -> dict[str, int]:
    """workload -> the most that one of its replicas holds now, over all GPUs, in bytes."""
    held: dict[Replica, int] = defaultdict(int)
    for (_, replica), taken in memory(table).items():
        held[replica] += taken
    found: dict[str, int] = {}
    for (name, _), taken in held.items():
        if instance := state.instances.get(name):
            key = placement.workload(instance.spec)
            found[key] = max(taken, found.get(key, 0))
    return found


def placed(node: Node, state: State, spec: InstanceSpec) -> tuple[Gpu, ...]:
    """The GPU of each replica of a new instance that asks for ``auto``. Raises: Problem when there is no room."""
    if spec.gpu_ids != AUTO:
        return ()
    devices, needs = nvml.devices(), node.needs.read()
    need = needs.get(placement.workload(spec))
    return placement.place(spec.replicas, devices, pending(node, state, devices, needs), need)


def pending(node: Node, state: State, devices: Sequence[Device], needs: Mapping[str, int]) -> dict[int, int]:
    """GPU number -> bytes that replicas on their way will take: those that shall run and do not answer yet."""
    found: dict[int, int] = defaultdict(int)
    running = [instance for instance in state.instances.values() if instance.wanted == "running"]
    for instance, index, device in placements(running, devices):
        if index not in instance.quarantined and not node.proved(instance, index):
            found[device.index] += needs.get(placement.workload(instance.spec), UNMEASURED_BYTES)
    return found
