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
    restart   wanted = running, launch + 1, restarts + 1
    move      other ports for replicas whose own are taken by other programs
    note_model  whether its model is missing on this machine, and its processes have to wait for it
    remove    instance gone; a seed's name stays in `seeded`, so that a deleted seed stays deleted

`core.generations` has the verbs that give an instance another spec, `core.sleep` those of one that sleeps,
`core.repairs` and `core.rolling` those for single replicas. `core.state_toml` reads and writes the state as the values
of a TOML file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.core.instance import Gpu, InstanceSpec
from appliance.core.layout import replica_process, stem_of
from appliance.core.port_choice import PROMETHEUS_PORTS, choose_ports, free_ports
from appliance.core.problems import Kind, Problem, instances_listed, invalid, nearest, quoted
from appliance.core.settings import Settings


@dataclass(frozen=True)
class Previous:
    """What an instance was before its spec was replaced: an undo goes back to it. undone: an undo has left it."""

    spec: InstanceSpec
    ports: tuple[int, ...]
    prometheus_ports: tuple[int, ...]
    placed: tuple[Gpu, ...] = ()
    undone: bool = False

    @classmethod
    def of(cls, instance: Instance) -> Previous:
        return cls(instance.spec, instance.ports, instance.prometheus_ports, instance.placed)


@dataclass(frozen=True)
class Instance:
    """A wanted instance: the spec as asked, the ports and GPU of each replica, and whether it shall run.

    Beside the generation that is called there may be processes of others, which are instances likewise: of the one that
    is to take over, and of the one before, which an undo finds ready. No two have a launch in common, nor a series.
    """

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
    series: int = 1  # in the names of its processes
    successor: Instance | None = None
    predecessor: Instance | None = None
    kept_until: float = 0.0  # of a predecessor, in seconds since 1970
    must_agree: bool = False  # of a successor: its golden answers have to be those of the generation that is called
    setback: str = ""  # why the generation that was to take over last has not
    launches: int = 0  # the highest launch that one which is gone had: none is given twice
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of a newer release

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def stem(self) -> str:
        """Of the names of its processes and logs."""
        return stem_of(self.name, self.series)

    def process(self, replica: int) -> str:
        """The name of the process of a replica, in the group that is called as the instance."""
        return replica_process(self.stem, replica)

    @property
    def generations(self) -> tuple[Instance, ...]:
        """All that have processes: the one that is called first."""
        return (self, *(each for each in (self.successor, self.predecessor) if each))

    @property
    def next_launch(self) -> int:
        return max(self.launches, *(each.launch for each in self.generations)) + 1

    @property
    def with_launches_kept(self) -> Instance:
        """The same before one of its generations goes: no launch is given twice, as it says which process it is."""
        return replace(self, launches=self.next_launch - 1)

    @property
    def falls_back(self) -> bool:
        """Whether what it was before comes back, if it does not start."""
        return self.unproved and self.previous is not None

    @property
    def holders(self) -> tuple[Instance | Previous, ...]:
        """Whose ports and names nobody else may have: what it was before only where that comes back by itself."""
        return (*self.generations, *([self.previous] if self.previous and self.falls_back else []))

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
    def generations(self) -> tuple[Instance, ...]:
        """All that have processes, of all instances."""
        return tuple(each for instance in self.instances.values() for each in instance.generations)

    def of_launch(self, name: str, launch: int) -> Instance | None:
        """The generation of an instance that has this launch."""
        instance = self.instances.get(name)
        return next((each for each in instance.generations if each.launch == launch), None) if instance else None

    @property
    def taken_ports(self) -> dict[int, str]:
        """Every port that an instance holds, and whose it is."""
        holders = [(each, instance.name) for instance in self.instances.values() for each in instance.holders]
        return {port: name for each, name in holders for port in (*each.ports, *each.prometheus_ports)}


def with_instance(state: State, instance: Instance) -> State:
    instances = {**state.instances, instance.name: instance}
    return replace(state, instances=dict(sorted(instances.items())))


def with_generation(state: State, name: str, launch: int, change: Callable[[Instance], Instance]) -> State:
    """The state with a change of that generation of an instance which has this launch; without such, as it was."""
    instance = state.instances.get(name)
    if instance is None:
        return state
    if instance.launch == launch:
        return with_instance(state, change(instance))
    if instance.successor and instance.successor.launch == launch:
        return with_instance(state, replace(instance, successor=change(instance.successor)))
    if instance.predecessor and instance.predecessor.launch == launch:
        return with_instance(state, replace(instance, predecessor=change(instance.predecessor)))
    return state


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
    refuse_new(state, spec, settings)
    ports, prometheus_ports = choose_ports(state.taken_ports, spec, settings, busy)
    added = Instance(spec, ports, prometheus_ports, created_at=now, placed=placed, lacks_model=lacks_model)
    return with_instance(state, put_to_sleep(added) if spec.is_on_demand else added)


def refuse_new(state: State, spec: InstanceSpec, settings: Settings) -> None:
    """Raises: Problem INSTANCE_EXISTS or MAX_INSTANCES_REACHED."""
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


def refuse_taken_names(state: State, spec: InstanceSpec) -> None:
    """Raises: Problem when an alias means another instance already."""
    for other in state.instances.values():
        if other.name == spec.name:
            continue
        own = {spec.name, *spec.aliases}
        theirs = {other.name, *(alias for each in other.holders for alias in each.spec.aliases)}
        if taken := sorted(own & theirs):
            words = f'{quoted(taken[0])} already means instance "{other.name}": a name or an alias has one instance'
            raise Problem(Kind.CONFLICT, "INSTANCE_EXISTS", words)


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


def start(state: State, name: str, halted: Collection[int] = ()) -> State:
    """The state in which an instance runs again; one with sound replicas keeps them: see `liftable`."""
    if liftable(state.get(name), halted):
        return lift(state, name)
    return with_instance(state, launched(state.get(name)))


def stop(state: State, name: str) -> State:
    return with_instance(state, replace(healed(alone(state.get(name))), wanted="stopped", sleeping=False))


def restart(state: State, name: str) -> State:
    instance = launched(state.get(name))
    return with_instance(state, replace(instance, restarts=instance.restarts + 1))


def note_model(state: State, name: str, lacking: bool) -> State:
    """Whether the model of an instance is missing on this machine. What stood with its replicas ends when it comes."""
    instance = state.instances.get(name)
    if instance is None or instance.lacks_model == lacking:
        return state
    return with_instance(state, replace(instance if lacking else healed(instance), lacks_model=lacking))


def liftable(instance: Instance, halted: Collection[int] = ()) -> tuple[int, ...]:
    """The quarantined and halted replicas of an instance that runs and has others; none where all are launched anew."""
    idle = {*instance.quarantined, *halted}
    return tuple(sorted(idle)) if instance.wanted == "running" and 0 < len(idle) < instance.spec.replicas else ()


def lift(state: State, name: str) -> State:
    """Quarantined replicas may run again, without a new launch of the others."""
    return with_instance(state, healed(state.get(name)))


def launched(instance: Instance) -> Instance:
    return replace(healed(instance), wanted="running", sleeping=False, launch=instance.next_launch)


def alone(instance: Instance) -> Instance:
    """Without another generation beside it, because it ends: one that was to take over is what it is from now on."""
    instance = instance.with_launches_kept
    if after := instance.successor:
        instance = in_place_of(instance, after)
    return replace(instance, successor=None, predecessor=None)


def in_place_of(instance: Instance, other: Instance) -> Instance:
    """Another generation as the one that is called; its processes stay as they are."""
    return replace(
        other,
        restarts=instance.restarts,
        extra=instance.extra,
        previous=Previous.of(instance),
        launches=instance.launches,
        must_agree=False,
        kept_until=0.0,
    )


def put_to_sleep(instance: Instance) -> Instance:
    return replace(instance, wanted="stopped", sleeping=True)


def healed(instance: Instance) -> Instance:
    return replace(instance, ejected={}, quarantined={}, rolling={})


def forget(state: State, created: Instance) -> State:
    """Without an instance that was just created and could not be started; another one of its name stays."""
    current = state.instances.get(created.name)
    return remove(state, created.name) if current and current.created_at == created.created_at else state


def remove(state: State, name: str) -> State:
    state.get(name)
    return replace(state, instances={key: value for key, value in state.instances.items() if key != name})
