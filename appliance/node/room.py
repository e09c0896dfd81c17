"""Who takes how much of what there is not enough of: of the memory that the appliance may use, and of each GPU's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from appliance.core import placement
from appliance.core.instance import PROGRAMS, InstanceSpec
from appliance.core.layout import replica_of
from appliance.core.placement import Device
from appliance.core.room import HOST, MIB, Tenant
from appliance.core.state import Instance, State
from appliance.core.status import ALIVE, Process
from appliance.drivers import activityfile, modelfiles, nvml, processes
from appliance.drivers.activityfile import LastUse
from appliance.node import gpus, servable
from appliance.node.context import Node

# Of a model that was never loaded here: its files, as they are read and as they are kept, and the program itself.
PER_FILE_BYTE, PROGRAM_BYTES, UNKNOWN_BYTES = 2, 256 * MIB, 1024 * MIB


def is_limited(node: Node, instance: Instance) -> bool:
    """Whether there may be too little room for an instance."""
    return bool(node.settings.memory_limit_mb) or instance.gpu_of(0) is not None


class Rooms:
    """As they are at one moment. Raises: Problem when supervisord does not answer."""

    def __init__(self, node: Node, state: State) -> None:
        self.node = node
        self.state = state
        self.devices = tuple(nvml.devices())
        self.memory_needs = node.memory_needs.read()
        self.gpu_needs = node.needs.read()
        self.processes = node.supervisor.processes()

    def demand(self, instance: Instance) -> dict[str, int]:
        """What all replicas of an instance take, by place, as far as it is limited and known."""
        takes: dict[str, int] = defaultdict(int)
        if self.node.settings.memory_limit_mb:
            takes[HOST] = self.memory_need(instance.spec) * instance.spec.replicas
        gpu_need = self.gpu_needs.get(placement.workload(instance.spec), 0)
        for _, _, device in placement.placed_replicas([instance], self.devices):
            takes[place_of(device)] += gpu_need
        return {place: need for place, need in takes.items() if need}

    def memory_need(self, spec: InstanceSpec) -> int:
        """Bytes of one replica: measured, else estimated by the size of the model."""
        return self.memory_needs.get(placement.workload(spec)) or estimated(spec)

    def free(self, tenants: Sequence[Tenant]) -> dict[str, int]:
        """What is left beside the tenants, by place."""
        taken = sum(tenant.takes.get(HOST, 0) for tenant in tenants)
        free = {HOST: self.node.settings.memory_limit_bytes - taken}
        pending = placement.pending(self.state.instances.values(), gpus.occupancy_of(self.node, self.state))
        for device in self.devices:
            if device.memory_free is not None:
                free[place_of(device)] = device.memory_free - pending.get(device.index, 0)
        return free

    def tenants(self) -> list[Tenant]:
        """The instances that run, or still have processes; deleted ones included."""
        used, ages = activityfile.uses(Path(self.node.layout.activity)), self.ages()
        known = [
            self.tenant(instance, used, ages)
            for instance in self.state.instances.values()
            if instance.wanted == "running" or instance.name in ages
        ]
        return known + [self.deleted(group) for group in ages.keys() - self.state.instances.keys() - set(PROGRAMS)]

    def deleted(self, group: str) -> Tenant:
        """One that still has processes; of GPUs the driver knows it."""
        pids = [each.pid for each in self.processes if each.group == group and each.pid]
        return Tenant(group, {HOST: sum(map(processes.peak_bytes, pids))}, ending=True)

    def tenant(self, instance: Instance, used: Mapping[str, LastUse], ages: Mapping[str, float]) -> Tenant:
        use = used.get(instance.name, LastUse(0.0, busy=False))
        return Tenant(
            instance.name,
            takes=self.demand(instance),
            on_demand=instance.spec.is_on_demand,
            busy=use.busy,
            ending=instance.wanted != "running",
            last_used=max(use.last, time.time() - ages.get(instance.name, 0.0)),
        )

    def ages(self) -> dict[str, float]:
        """For how many seconds each instance has had a process."""
        ages: dict[str, float] = {}
        for process in self.processes:
            if process.state in (*ALIVE, "STOPPING") and replica_of(process.group, process.name) is not None:
                ages[process.group] = max(ages.get(process.group, 0.0), process.uptime or 0.0)
        return ages


def place_of(device: Device) -> str:
    return f"GPU {device.index}"


def estimated(spec: InstanceSpec) -> int:
    place = servable.location(spec)
    if place is None:
        return UNKNOWN_BYTES
    return PROGRAM_BYTES + PER_FILE_BYTE * sum(file.size for file in modelfiles.serving_files(place.folder))


def memory_peaks(state: State, table: Sequence[Process], answering: Collection[int]) -> dict[str, int]:
    """workload -> the most memory that one of its replicas has had, in bytes. answering: the processes that have loaded
    their model: what one has that has not says nothing of what it needs."""
    most: dict[str, int] = {}
    for process in table:
        instance = state.instances.get(process.group)
        if (
            instance
            and process.pid
            and process.pid in answering
            and replica_of(process.group, process.name) is not None
        ):
            key = placement.workload(instance.spec)
            most[key] = max(processes.peak_bytes(process.pid), most.get(key, 0))
    return most
