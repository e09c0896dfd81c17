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
USABLE_SHARE = 0.8  # of the memory that the machine has to spare


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

    def demand(self, instance: Instance, without: Collection[int] = ()) -> dict[str, int]:
        """What the replicas of an instance take, by place, as far as it is limited and known; without some of them."""
        takes: dict[str, int] = defaultdict(int)
        if self.node.settings.memory_limit_mb:
            takes[HOST] = self.memory_need(instance.spec) * (instance.spec.replicas - len(without))
        gpu_need = self.gpu_needs.get(placement.workload(instance.spec), 0)
        for _, replica, device in placement.placed_replicas([instance], self.devices):
            if replica not in without:
                takes[place_of(device)] += gpu_need
        return {place: need for place, need in takes.items() if need}

    def memory_need(self, spec: InstanceSpec) -> int:
        """Bytes of one replica: measured, else estimated by the size of the model."""
        return self.memory_needs.get(placement.workload(spec)) or estimated(spec)

    def free(self, tenants: Sequence[Tenant]) -> dict[str, int]:
        """What is left beside the tenants, by place."""
        taken = sum(tenant.takes.get(HOST, 0) for tenant in tenants)
        free = {HOST: self.node.settings.memory_limit_bytes - taken}
        pending = placement.pending(self.state.generations, gpus.occupancy_of(self.node, self.state))
        for device in self.devices:
            if device.memory_free is not None:
                free[place_of(device)] = device.memory_free - pending.get(device.index, 0)
        return free

    def tenants(self) -> list[Tenant]:
        """Of each instance that runs, or still has processes, the generations; deleted ones included."""
        used, ages = activityfile.uses(Path(self.node.layout.activity)), self.ages()
        known = [
            self.tenant(each, used, ages)
            for each in self.state.generations
            if each.wanted == "running" or each.stem in ages
        ]
        gone = ages.keys() - {each.stem for each in self.state.generations}
        return known + [self.deleted(stem) for stem in gone]

    def deleted(self, stem: str) -> Tenant:
        """One that still has processes; of GPUs the driver knows it."""
        pids = [each.pid for each in self.processes if stem_of_process(each) == stem and each.pid]
        return Tenant(stem, {HOST: sum(map(processes.peak_bytes, pids))}, ending=True)

    def tenant(self, instance: Instance, used: Mapping[str, LastUse], ages: Mapping[str, float]) -> Tenant:
        """A predecessor, which nobody calls, is the first to give way; what is about to be replaced is not."""
        current = self.state.get(instance.name)
        takes = self.demand(instance, without=instance.quarantined)  # of which nothing runs
        if instance is current.predecessor:
            return Tenant(instance.stem, takes, on_demand=True)
        use = used.get(instance.name, LastUse(0.0, busy=False))
        return Tenant(
            instance.stem,
            takes=takes,
            on_demand=instance.spec.is_on_demand,
            busy=use.busy or current.successor is not None,
            ending=instance.wanted != "running",
            last_used=max(use.last, time.time() - ages.get(instance.stem, 0.0)),
        )

    def ages(self) -> dict[str, float]:
        """For how many seconds each generation has had a process."""
        ages: dict[str, float] = {}
        for process in self.processes:
            if process.state in (*ALIVE, "STOPPING") and (stem := stem_of_process(process)):
                ages[stem] = max(ages.get(stem, 0.0), process.uptime or 0.0)
        return ages


def stem_of_process(process: Process) -> str | None:
    """Of a replica; None for another program."""
    known = None if process.group in PROGRAMS else replica_of(process.group, process.name)
    return known.stem if known else None


def needs_of(node: Node, instance: Instance) -> dict[str, int]:
    """Bytes that all replicas of an instance take, by place: measured, or of memory estimated; of a GPU only if it was
    measured."""
    key = placement.workload(instance.spec)
    needs = {HOST: (node.memory_needs.read().get(key) or estimated(instance.spec)) * instance.spec.replicas}
    if instance.gpu_of(0) is not None and (measured := node.needs.read().get(key)):
        for _, _, device in placement.placed_replicas([instance], nvml.devices()):
            needs[place_of(device)] = needs.get(place_of(device), 0) + measured
    return needs


def hindrance(node: Node, instance: Instance, leaving: Instance | None = None) -> str:
    """Why it is not known that an instance fits beside all that runs; empty where nothing speaks against it. Where
    there is a limit, `operations.room` decides, too. leaving: who ends before."""
    if instance.gpu_of(0) is not None and placement.workload(instance.spec) not in node.needs.read():
        return "nobody has measured yet what it takes of its GPU"
    need, free = needs_of(node, instance)[HOST], int(processes.memory_available() * USABLE_SHARE)
    if leaving:
        free += needs_of(node, leaving)[HOST]
    if need > free:
        return f"it needs some {need // MIB} MiB of memory, and this machine has {free // MIB} MiB to spare"
    return ""


def place_of(device: Device) -> str:
    return f"GPU {device.index}"


def estimated(spec: InstanceSpec) -> int:
    place = servable.location(spec)
    if place is None:
        return UNKNOWN_BYTES
    return PROGRAM_BYTES + PER_FILE_BYTE * sum(file.size for file in modelfiles.serving_files(place.folder))


def keep_peaks(node: Node, state: State, table: Sequence[Process], answering: Collection[int]) -> None:
    """Keep how much each workload was seen to take: of GPUs for `gpu_ids: "auto"`, and to make room.

    answering: as for `memory_peaks`. Raises: OSError, filelock.Timeout.
    """
    node.needs.raise_to(gpus.peaks(state, table))
    node.memory_needs.raise_to(memory_peaks(state, table, answering))


def memory_peaks(state: State, table: Sequence[Process], answering: Collection[int]) -> dict[str, int]:
    """workload -> the most memory that one of its replicas has had, in bytes. answering: the processes that have loaded
    their model: what one has that has not says nothing of what it needs."""
    most: dict[str, int] = {}
    by_stem = {each.stem: each for each in state.generations}
    for process in table:
        instance = by_stem.get(stem_of_process(process) or "")
        if instance and process.pid and process.pid in answering:
            key = placement.workload(instance.spec)
            most[key] = max(processes.peak_bytes(process.pid), most.get(key, 0))
    return most
