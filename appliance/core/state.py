"""State: which instances are wanted, whether they shall run, and the ports they were given. Immutable.

Theory of operation. The state is the only memory of the appliance. Every verb is a pure change of it; making
supervisor match is `supervision.reconcile`'s work and can be repeated at any time. `launch` is a counter per instance
that is rendered into its supervisor section: raising it makes the section differ, and supervisor's own comparison
then replaces the running group. So start and restart survive a crash between the decision and the effect, because
the decision is in the file.

    verb      change
    add       instance with ports, wanted = running, launch 1
    start     wanted = running, launch + 1   (also lifts an operator's `supervisorctl stop`); lift, where some
              replicas of one that runs are quarantined, and others are sound
    stop      wanted = stopped
    sleep     wanted = stopped, and sleeping: the next call starts it
    wake      as start, of one that sleeps
    roll      its replicas are restarted one after the other; rolled: one of them was
    restart   wanted = running, launch + 1, restarts + 1
    move      other ports for replicas whose own are taken by other programs
    note_model  whether its model is missing on this machine, and its processes have to wait for it
    eject     a replica gets no traffic; readmit ends that
    quarantine  a replica shall not run until start, restart or lift
    remove    instance gone; a seed's name stays in `seeded`, so that a deleted seed stays deleted

`core.generations` has the verbs that give an instance another spec. `core.state_toml` reads and writes the state as the
values of a TOML file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.core.instance import Gpu, InstanceSpec
from appliance.core.port_choice import PROMETHEUS_PORTS, choose_ports, free_ports
from appliance.core.problems import Kind, Problem, instances_listed, invalid, nearest, quoted
from appliance.core.settings import Settings


@dataclass(frozen=True)
class Previous:
    """What an instance was before its spec was replaced: an undo goes back to it."""

    spec: InstanceSpec
    ports: tuple[int, ...]
    prometheus_ports: tuple[int, ...]
    placed: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Instance:
    """A wanted instance: the spec as asked, the ports and GPU of each replica, and whether it shall run."""

    spec: InstanceSpec
    ports: tuple[int, ...]
    prometheus_ports: tuple[int, ...]
    created_at: str
    wanted: str = "running"
    launch: int = 1
    restarts: int = 0
    ejected: Mapping[int, str] = field(default_factory=dict)  # replica -> why it gets no traffic
    quarantined: Mapping[int, str] = field(default_factory=dict)  # replica -> why it shall not run
    placed: tuple[Gpu, ...] = ()  # the GPU of each replica, where the appliance chose
    lacks_model: bool = False  # the model is not on this machine: no process is started before it is
    rolling: Mapping[int, int] = field(
        default_factory=dict
    )  # replica -> the process that a restart has not replaced yet
    sleeping: bool = False  # stopped until it is called; an earlier release takes it for stopped
    generation: int = 1  # rises when its spec is replaced: answers of two generations do not go into one batch
    previous: Previous | None = None
    unproved: bool = False  # since it was replaced no replica of it has answered
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of a newer release

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def falls_back(self) -> bool:
        """Whether what it was before comes back, if it does not start."""
        return self.unproved and self.previous is not None

    @property
    def is_offered(self) -> bool:
        """Whether calls are answered: it shall run, or sleeps until one comes."""
        return self.wanted == "running" or self.sleeping

    def gpu_of(self, replica: int) -> Gpu | None:
        gpus = self.placed or self.spec.gpus
        return gpus[replica % len(gpus)] if gpus else None


@dataclass(frozen=True)
class State:
    """All instances by name (sorted), the seeds already added once, and a number that rises with every change.

    extra: fields of a newer release.
    """

    generation: int = 0
    seeded: frozenset[str] = frozenset()
    instances: Mapping[str, Instance] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Instance:
        """Raises: Problem (not_found) that lists what exists."""
        if name not in self.instances:
            message = f"Instance {quoted(name)} not found{nearest(name, self.instances)}"
            raise Problem(Kind.NOT_FOUND, "INSTANCE_NOT_FOUND", message + instances_listed(self.instances))
        return self.instances[name]

    @property
    def taken_ports(self) -> dict[int, str]:
        """Every port that an instance holds, and whose it is."""
        taken: dict[int, str] = {}
        for instance in self.instances.values():
            held = (instance, instance.previous) if instance.previous else (instance,)
            taken |= {port: instance.name for each in held for port in (*each.ports, *each.prometheus_ports)}
        return taken


def with_instance(state: State, instance: Instance) -> State:
    instances = {**state.instances, instance.name: instance}
    return replace(state, instances=dict(sorted(instances.items())))


def add(
    state: State,
    spec: InstanceSpec,
    settings: Settings,
    busy: Collection[int],
    now: str,
    placed: tuple[Gpu, ...] = (),
    lacks_model: bool = False,
) -> State:
    """The state with a new instance that shall run, or sleeps until it is called.

    busy: ports of this machine on which something listens already. now: RFC 3339 UTC. placed, lacks_model: see
    `Instance`.
    Raises: Problem INSTANCE_EXISTS, MAX_INSTANCES_REACHED, PORT_CONFLICT or PORT_ALLOCATION_FAILED.
    """
    if spec.name in state.instances:
        raise Problem(
            Kind.CONFLICT,
            "INSTANCE_EXISTS",
            f'Instance "{spec.name}" already exists: choose another name or delete it first',
        )
    refuse_taken_names(state, spec)
    if settings.max_instances is not None and len(state.instances) >= settings.max_instances:
        raise invalid(
            f"Maximum instance count ({settings.max_instances}) reached: delete an instance or raise max_instances",
            "MAX_INSTANCES_REACHED",
        )
    ports, prometheus_ports = choose_ports(state.taken_ports, spec, settings, busy)
    added = Instance(spec, ports, prometheus_ports, created_at=now, placed=placed, lacks_model=lacks_model)
    return with_instance(state, put_to_sleep(added) if spec.is_on_demand else added)


def refuse_taken_names(state: State, spec: InstanceSpec) -> None:
    """Raises: Problem when an alias means another instance already."""
    for other in state.instances.values():
        if other.name == spec.name:
            continue
        own, theirs = {spec.name, *spec.aliases}, {other.name, *other.spec.aliases}
        if taken := sorted(own & theirs):
            raise Problem(
                Kind.CONFLICT,
                "INSTANCE_EXISTS",
                f'{quoted(taken[0])} already means instance "{other.name}": a name or an alias has one instance',
            )


def seed(
    state: State,
    spec: InstanceSpec,
    settings: Settings,
    busy: Collection[int],
    now: str,
    placed: tuple[Gpu, ...] = (),
) -> State:
    """The state with a seed of the configuration file, unless it was added before (then a deletion stands)."""
    if spec.name in state.seeded or spec.name in state.instances:
        return replace(state, seeded=state.seeded | {spec.name})
    grown = add(state, spec, settings, busy, now, placed)
    return replace(grown, seeded=grown.seeded | {spec.name})


def move(state: State, name: str, settings: Settings, taken: Collection[int], busy: Collection[int]) -> State:
    """Other ports for the replicas of an instance whose own are ``taken`` by other programs, where the appliance chose
    them. busy: as for `add`. Raises: Problem PORT_ALLOCATION_FAILED."""
    instance = state.get(name)
    unusable = {*state.taken_ports, *settings.own_ports, *busy, *taken}
    ports, prometheus_ports = list(instance.ports), list(instance.prometheus_ports)
    first = settings.prometheus_port_start
    ranges = (
        (instance.spec.port, ports, settings.instance_port_start, settings.instance_port_end),
        (instance.spec.asked_prometheus_port, prometheus_ports, first, min(first + PROMETHEUS_PORTS, 65536)),
    )
    for asked, current, start, end in ranges:
        for replica, port in enumerate(current):
            if asked is None and port in taken:
                (current[replica],) = free_ports(1, start, end, unusable)
                unusable.add(current[replica])
    return with_instance(state, replace(instance, ports=tuple(ports), prometheus_ports=tuple(prometheus_ports)))


def start(state: State, name: str) -> State:
    """The state in which an instance runs again; one with sound replicas keeps them: see `liftable`."""
    if liftable(state.get(name)):
        return lift(state, name)
    return with_instance(state, launched(state.get(name)))


def stop(state: State, name: str) -> State:
    return with_instance(state, replace(healed(state.get(name)), wanted="stopped", sleeping=False))


def sleep(state: State, name: str, launch: int | None = None) -> State:
    """The state in which an instance that runs has no process until it is called. launch: nothing changes for another
    one than this."""
    instance = state.instances.get(name)
    if instance is None or instance.wanted != "running" or launch not in (None, instance.launch):
        return state
    return with_instance(state, put_to_sleep(healed(instance)))


def sleep_on_demand(state: State) -> State:
    """At the start of the appliance those begin to sleep that run on demand only."""
    for instance in state.instances.values():
        if instance.spec.is_on_demand:
            state = sleep(state, instance.name)
    return state


def wake(state: State, name: str) -> State:
    """The state in which an instance that slept runs; of one that does not sleep nothing changes."""
    instance = state.get(name)
    return with_instance(state, launched(instance)) if instance.sleeping else state


def restart(state: State, name: str) -> State:
    instance = launched(state.get(name))
    return with_instance(state, replace(instance, restarts=instance.restarts + 1))


def roll(state: State, name: str, launch: int, rolling: Mapping[int, int]) -> State:
    """Replicas of a running instance that are to be restarted one after the other; none: no more. What stood with its
    replicas ends."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or instance.wanted != "running":
        return state
    return with_instance(state, replace(healed(instance) if rolling else instance, rolling=rolling))


def rolled(state: State, name: str, launch: int, replica: int) -> State:
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or replica not in instance.rolling:
        return state
    left = {each: pid for each, pid in instance.rolling.items() if each != replica}
    return with_instance(state, replace(instance, rolling=left))


def note_model(state: State, name: str, lacking: bool) -> State:
    """Whether the model of an instance is missing on this machine. What stood with its replicas ends when it comes."""
    instance = state.instances.get(name)
    if instance is None or instance.lacks_model == lacking:
        return state
    return with_instance(state, replace(instance if lacking else healed(instance), lacks_model=lacking))


def liftable(instance: Instance) -> tuple[int, ...]:
    """The quarantined replicas of an instance that runs and has others; none where a start is a new launch of all."""
    some = instance.wanted == "running" and 0 < len(instance.quarantined) < instance.spec.replicas
    return tuple(instance.quarantined) if some else ()


def lift(state: State, name: str) -> State:
    """Quarantined replicas may run again, without a new launch of the others."""
    return with_instance(state, healed(state.get(name)))


def launched(instance: Instance) -> Instance:
    return replace(healed(instance), wanted="running", sleeping=False, launch=instance.launch + 1)


def put_to_sleep(instance: Instance) -> Instance:
    return replace(instance, wanted="stopped", sleeping=True)


def healed(instance: Instance) -> Instance:
    return replace(instance, ejected={}, quarantined={}, rolling={})


def eject(state: State, name: str, replica: int, launch: int, reason: str) -> State:
    """What the monitor saw of an earlier launch says nothing of this one: then nothing changes."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or replica in instance.ejected:
        return state
    return with_instance(state, replace(instance, ejected={**instance.ejected, replica: reason}))


def readmit(state: State, name: str, replica: int) -> State:
    instance = state.instances.get(name)
    if instance is None or replica not in instance.ejected:
        return state
    return with_instance(state, replace(instance, ejected=without(instance.ejected, replica)))


def quarantine(state: State, name: str, replica: int, launch: int, reason: str) -> State:
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or replica in instance.quarantined:
        return state
    quarantined = {**instance.quarantined, replica: reason}
    ejected = without(instance.ejected, replica)
    return with_instance(state, replace(instance, quarantined=quarantined, ejected=ejected))


def count_restart(state: State, name: str, launch: int) -> State:
    """One more process in place of another, by the monitor or by supervisord itself."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch:
        return state
    return with_instance(state, replace(instance, restarts=instance.restarts + 1))


def without(reasons: Mapping[int, str], replica: int) -> Mapping[int, str]:
    return {key: reason for key, reason in reasons.items() if key != replica}


def forget(state: State, created: Instance) -> State:
    """Without an instance that was just created and could not be started; another one of its name stays."""
    current = state.instances.get(created.name)
    return remove(state, created.name) if current and current.created_at == created.created_at else state


def remove(state: State, name: str) -> State:
    state.get(name)
    return replace(state, instances={key: value for key, value in state.instances.items() if key != name})
