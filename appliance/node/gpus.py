"""GPUs and the replicas on them: what NVML shows, what the state has placed, and what a workload was seen to take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from appliance.core import placement
from appliance.core.instance import AUTO, InstanceSpec
from appliance.core.layout import replica_of
from appliance.core.placement import Occupancy
from appliance.core.state import Instance, State
from appliance.core.status import ALIVE, Process
from appliance.core.views import GpuReplicaView, GpuView
from appliance.drivers import nvml, processes
from appliance.node.context import Node


class ReplicaId(NamedTuple):
    """stem: of the generation's processes."""

    instance: str
    replica: int
    stem: str


class Use(NamedTuple):
    """A replica that has memory on a GPU."""

    gpu: int
    replica: ReplicaId


def show(node: Node) -> list[GpuView]:
    """Every visible GPU with our replicas on it: those placed there, and those whose processes have memory there."""
    devices = nvml.devices()
    if not devices:
        return []
    used = memory_by_use(node.supervisor.processes())
    there: dict[int, dict[ReplicaId, int | None]] = {device.index: {} for device in devices}
    for instance, index, device in placement.placed_replicas(node.state.read().generations, devices):
        there[device.index][ReplicaId(instance.name, index, instance.stem)] = None
    for (gpu, replica), taken in used.items():
        there.setdefault(gpu, {})[replica] = taken
    return [
        GpuView(
            device,
            tuple(
                GpuReplicaView(replica.instance, replica.replica, taken)
                for replica, taken in sorted(there[device.index].items())
            ),
        )
        for device in devices
    ]


def memory_by_use(table: Sequence[Process]) -> dict[Use, int]:
    """Bytes that the process of a replica and the children of that hold on a GPU."""
    owners = {
        process.pid: ReplicaId(process.group, known.replica, known.stem)
        for process in table
        if process.pid and process.state in ALIVE
        if (known := replica_of(process.group, process.name))
    }
    used: dict[Use, int] = defaultdict(int)
    for gpu, pid, taken in nvml.memory_by_process():
        owner = next((owners[ancestor] for ancestor in processes.lineage(pid) if ancestor in owners), None)
        if owner:
            used[Use(gpu, owner)] += taken
    return used


def memory_by_instance(table: Sequence[Process]) -> dict[str, int]:
    """Bytes that all processes of an instance hold, over all GPUs; only of those that hold some."""
    used: dict[str, int] = defaultdict(int)
    for use, taken in memory_by_use(table).items():
        used[use.replica.instance] += taken
    return used


def peaks(state: State, table: Sequence[Process]) -> dict[str, int]:
    """workload -> the most that one of its replicas holds now, over all GPUs, in bytes."""
    by_replica: dict[ReplicaId, int] = defaultdict(int)
    for use, taken in memory_by_use(table).items():
        by_replica[use.replica] += taken
    most: dict[str, int] = {}
    by_stem = {each.stem: each for each in state.generations}
    for replica, taken in by_replica.items():
        if instance := by_stem.get(replica.stem):
            key = placement.workload(instance.spec)
            most[key] = max(taken, most.get(key, 0))
    return most


def occupancy(node: Node, state: State, spec: InstanceSpec) -> Occupancy:
    """What is to be known before a new instance is placed; nothing unless it asks for ``auto``."""
    return occupancy_of(node, state) if spec.gpu_ids == AUTO else Occupancy()


def occupancy_of(node: Node, state: State) -> Occupancy:
    """The GPUs, and who of the replicas on them has taken its memory."""
    devices, needs = tuple(nvml.devices()), node.needs.read()
    running = [instance for instance in state.generations if instance.wanted == "running"]
    table = node.listening()
    answering = frozenset(
        (instance.name, instance.launch, index)
        for instance, index, _ in placement.placed_replicas(running, devices)
        if node.proved(instance, index, table)
    )
    return Occupancy(devices, needs, answering, held_by(node, running) if devices else {})


def held_by(node: Node, instances: Sequence[Instance]) -> dict[placement.ReplicaKey, int]:
    """Bytes of GPU memory that their replicas have, also those that are still loading."""
    by_stem = {each.stem: each for each in instances}
    held: dict[placement.ReplicaKey, int] = defaultdict(int)
    for use, taken in memory_by_use(node.supervisor.processes()).items():
        if each := by_stem.get(use.replica.stem):
            held[each.name, each.launch, use.replica.replica] += taken
    return held
