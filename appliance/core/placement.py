"""Which GPU a replica gets, and what is missing when none has room.

Theory of operation. ``gpu_ids: "auto"`` places replicas one after the other, each on the GPU with the most memory left
after those before it. What a replica takes is known when the same work (`workload`: model and limits) was measured
before, as the peak of its processes; then a GPU without that much room is refused. What was never measured is taken
for `UNMEASURED_BYTES`, which only spreads replicas and never refuses. A replica that does not answer yet has not taken
its memory yet: what it lacks of its need is subtracted from what the driver calls free. Placement is decided once, at
creation, and kept, so that a restart comes back to the same GPU. An instance on demand has no memory as yet: it gets
the GPU where the fewest have their place, asleep or not, of those that could hold it.

Which GPUs there are: those that the appliance's own CUDA_VISIBLE_DEVICES leaves, in the order of the PCI bus, which is
NVML's. CUDA's own default order is fastest first, so replicas get CUDA_DEVICE_ORDER=PCI_BUS_ID with their number.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from appliance.core.instance import AUTO, Gpu, InstanceSpec
from appliance.core.problems import Problem, invalid
from appliance.core.state import Instance

UNMEASURED_BYTES = 4 * 1024**3  # more than most embedding models take with their batches
MIB = 1024**2


@dataclass(frozen=True)
class Device:
    """One GPU as its driver shows it. Memory in bytes, utilisation 0 to 1, temperature in degrees Celsius.

    What the driver does not tell is None; ``error`` says why when that is the memory: then the GPU is of no use.
    """

    index: int
    uuid: str
    name: str | None
    memory_total: int | None
    memory_used: int | None
    memory_free: int | None
    utilization: float | None
    temperature: int | None
    error: str | None = None


def visible(devices: Sequence[Device], variable: str | None) -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES leaves (None: not set), read as CUDA does: the first unknown entry ends it."""
    if variable is None:
        return list(devices)
    left: list[Device] = []
    for entry in (part.strip() for part in variable.split(",")):
        device = find(devices, int(entry) if entry.isascii() and entry.isdigit() else entry)
        if device is None:
            break
        left.append(device)
    return sorted(left, key=lambda device: device.index)


def find(devices: Sequence[Device], wanted: Gpu) -> Device | None:
    """By number, or by UUID, of which CUDA takes the beginning where that is unique."""
    if isinstance(wanted, int):
        return next((device for device in devices if device.index == wanted), None)
    matches = [device for device in devices if wanted and device.uuid.startswith(wanted)]
    return matches[0] if len(matches) == 1 else None


def refuse_unknown(spec: InstanceSpec, devices: Sequence[Device]) -> None:
    """Raises: Problem INVALID_GPU_ID that lists the GPUs there are."""
    listed = ", ".join(f"{device.index} ({device.uuid})" for device in devices)
    there = (
        f"this appliance has {listed}" if listed else "no NVIDIA driver answers here, or none of its GPUs is visible"
    )
    if spec.gpu_ids == AUTO and not devices:
        raise invalid(f'"gpu_ids" cannot be "auto": {there}', "INVALID_GPU_ID")
    for wanted in spec.gpus:
        if find(devices, wanted) is None:
            raise invalid(f"Invalid GPU ID {wanted}: {there}", "INVALID_GPU_ID")


def workload(spec: InstanceSpec) -> str:
    """What decides how much memory a replica takes, as one line of text."""
    keys = (
        *("model_id", "revision", "engine", "pooling", "dtype"),
        *("max_batch_tokens", "max_concurrent_requests", "extra_args"),
    )
    return json.dumps([getattr(spec, key) for key in keys])


ReplicaKey = tuple[str, int, int]  # instance, launch, replica


@dataclass(frozen=True)
class Occupancy:
    """What was seen of the GPUs and of the replicas on them.

    needs: the measured peak of one replica in bytes, by workload. answering: the replicas that answered, and so had
    taken their memory; others of the state have not, nor those of a later launch. held: bytes that these have so far.
    """

    devices: tuple[Device, ...] = ()
    needs: Mapping[str, int] = field(default_factory=dict)
    answering: frozenset[ReplicaKey] = frozenset()
    held: Mapping[ReplicaKey, int] = field(default_factory=dict)


class PlacedReplica(NamedTuple):
    instance: Instance
    replica: int
    device: Device


def placed_replicas(instances: Iterable[Instance], devices: Sequence[Device]) -> Iterator[PlacedReplica]:
    """Each replica that stands on one of these GPUs."""
    for instance in instances:
        for replica in range(instance.spec.replicas):
            gpu = instance.gpu_of(replica)
            device = find(devices, gpu) if gpu is not None else None
            if device:
                yield PlacedReplica(instance, replica, device)


def pending(instances: Iterable[Instance], occupancy: Occupancy) -> dict[int, int]:
    """GPU number -> bytes that replicas on their way will take: those that shall run and do not answer yet."""
    taken: dict[int, int] = defaultdict(int)
    running = [instance for instance in instances if instance.wanted == "running"]
    for instance, replica, device in placed_replicas(running, occupancy.devices):
        key = (instance.name, instance.launch, replica)
        if replica not in instance.quarantined and key not in occupancy.answering:
            need = occupancy.needs.get(workload(instance.spec), UNMEASURED_BYTES)
            taken[device.index] += max(0, need - occupancy.held.get(key, 0))
    return taken


def without(occupancy: Occupancy, leaving: Iterable[Instance]) -> Occupancy:
    """As the GPUs will be when the processes of these generations have ended. What the driver calls free is beside
    them."""
    back: dict[int, int] = defaultdict(int)
    for instance, replica, device in placed_replicas(leaving, occupancy.devices):
        if (instance.name, instance.launch, replica) in occupancy.answering:
            back[device.index] += occupancy.needs.get(workload(instance.spec), 0)
    devices = []
    for device in occupancy.devices:
        free = None if device.memory_free is None else device.memory_free + back[device.index]
        most = device.memory_total
        devices.append(replace(device, memory_free=free if free is None or most is None else min(free, most)))
    return replace(occupancy, devices=tuple(devices))


def place_beside(instances: Iterable[Instance], spec: InstanceSpec, occupancy: Occupancy) -> tuple[Gpu, ...]:
    """The GPU of each replica of a new instance beside these, where it asks for ``auto``; else nothing is chosen.

    Raises: Problem when there is no room.
    """
    if spec.gpu_ids != AUTO:
        return ()
    need = occupancy.needs.get(workload(spec))
    if spec.is_on_demand:
        return place_sleeper(instances, spec.replicas, need, occupancy)
    return place(spec.replicas, occupancy.devices, pending(instances, occupancy), need)


def place_sleeper(
    instances: Iterable[Instance], replicas: int, need: int | None, occupancy: Occupancy
) -> tuple[int, ...]:
    """The GPU number of each replica of an instance that sleeps as yet: where the fewest others have their place,
    asleep or not. When it starts, room is made on the GPU that it has, so that has to be large enough as a whole.

    Raises: Problem INSUFFICIENT_GPU_MEMORY.
    """
    whole = [replace(device, memory_free=device.memory_total) for device in occupancy.devices]
    fitting = [each for each in whole if need is None or each.memory_free is None or each.memory_free >= need]
    if need is not None and not fitting:
        largest = max(whole, key=lambda each: each.memory_free or 0)
        raise short(0, replicas, need, largest.index, largest.memory_free or 0)
    placed: dict[int, int] = defaultdict(int)
    for instance, _, device in placed_replicas(instances, occupancy.devices):
        placed[device.index] += occupancy.needs.get(workload(instance.spec), UNMEASURED_BYTES)
    return place(replicas, fitting, placed, None)


def place(replicas: int, devices: Sequence[Device], pending: Mapping[int, int], need: int | None) -> tuple[int, ...]:
    """The GPU number of each replica.

    pending: bytes that replicas on the way will take, by GPU number. need: the measured peak of one replica in bytes.
    Raises: Problem INSUFFICIENT_GPU_MEMORY that says what is missing.
    """
    left = {
        device.index: device.memory_free - pending.get(device.index, 0)
        for device in devices
        if device.memory_free is not None
    }
    if not left:
        raise invalid('"gpu_ids" cannot be "auto": no GPU tells how much memory it has', "INVALID_GPU_ID")
    chosen = []
    for replica in range(replicas):
        best = max(left, key=lambda index: (left[index], -index))
        if need is not None and left[best] < need:
            raise short(replica, replicas, need, best, left[best])
        left[best] -= UNMEASURED_BYTES if need is None else need
        chosen.append(best)
    return tuple(chosen)


def short(replica: int, replicas: int, need: int, best: int, left: int) -> Problem:
    return invalid(
        f"Replica {replica} of {replicas} needs {need // MIB} MiB of GPU memory, as measured in an earlier run of this "
        f"model with these limits; GPU {best} has the most left, {max(0, left) // MIB} MiB: {(need - left) // MIB + 1} "
        "MiB are missing. Stop another instance, ask for fewer replicas or a lower max_batch_tokens, or name a GPU",
        "INSUFFICIENT_GPU_MEMORY",
    )
