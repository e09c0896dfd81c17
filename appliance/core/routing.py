"""Target -> replica: by instance name, by model, or by position in the name-sorted list.

Theory of operation. A `Table` is an immutable picture of what the state file wants; whether a replica is connected
and how many texts it holds is measured by the process that routes, and comes in as arguments. `candidates` says which
replicas may answer a target, or the Problem; `pick` chooses among those that are ready, for single calls, batches and
suspects alike. Nothing waits here: without a ready replica the caller gets UNAVAILABLE at once, with where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from appliance.core.instance import InstanceSpec
from appliance.core.problems import Kind, Problem, instances_listed, invalid, nearest, quoted
from appliance.core.state import Instance, State


@dataclass(frozen=True)
class Replica:
    """One process that may answer: where it listens, and which instance it belongs to."""

    instance: str
    index: int
    address: str
    model_id: str
    launch: int
    capacity: int  # texts that it takes at once: its max_concurrent_requests
    server_name: str = ""  # of a replica that is not this appliance's own: the name in its certificate
    is_peer: bool = False  # another appliance, with all its replicas of the instance

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_local(self) -> bool:
        """Whether supervisord of this appliance has started it."""
        return not self.server_name


@dataclass(frozen=True)
class Route:
    """An instance as routing sees it."""

    name: str
    model_id: str
    wanted: str
    replicas: tuple[Replica, ...]
    space: tuple[tuple[str, str], ...] = ()  # what decides the vectors, by name
    aliases: tuple[str, ...] = ()  # asked for like the model's id
    default: bool = False  # of what names nobody
    cache: bool = True  # its embeddings may be kept
    express: bool = False  # Envoy sends calls to its replicas as well, which nobody counts here
    lacks_model: bool = False  # its model is not on this machine, or not yet
    sleeping: bool = False  # stopped until it is called
    generation: int = 1  # of its spec; 0 where it runs elsewhere, and nobody tells
    falls_back: bool = False  # to what it was before, if it does not start
    ejected: tuple[Replica, ...] = ()  # replicas that get no traffic: the monitor saw them silent, wrong or dying
    arrival: str = ""  # on a cluster: starting, sleeping or failed, while it has no replica

    @property
    def is_offered(self) -> bool:
        """Whether calls are answered: it shall run, or sleeps until one comes."""
        return self.wanted == "running" or self.sleeping

    @property
    def is_local(self) -> bool:
        """Whether this appliance itself runs it; one of its own always has a replica."""
        return bool(self.replicas or self.ejected) and all(each.is_local for each in self.replicas)


@dataclass(frozen=True)
class Table:
    """All instances in name order. elsewhere: those of other appliances, which get what none of ours is asked for."""

    routes: tuple[Route, ...] = ()
    elsewhere: tuple[Route, ...] = ()

    @property
    def all(self) -> tuple[Route, ...]:
        return (*self.routes, *self.elsewhere)

    @property
    def listed(self) -> str:
        """The end of a message to a caller whose target is none of them, or who named none."""
        return instances_listed(f"{route.name} ({route.model_id})" for route in self.all)


def table_of(state: State, host: str, engine: str) -> Table:
    """engine: of instances that ask for none."""
    return Table(tuple(route_of(each, replicas_at(each, host), engine) for each in state.instances.values()))


def replicas_at(instance: Instance, host: str) -> tuple[Replica, ...]:
    return tuple(
        Replica(
            instance=instance.name,
            index=index,
            address=f"{host}:{port}",
            model_id=instance.spec.model_id,
            launch=instance.launch,
            capacity=instance.spec.max_concurrent_requests,
        )
        for index, port in enumerate(instance.ports)
    )


def route_of(instance: Instance, replicas: tuple[Replica, ...], engine: str) -> Route:
    without_traffic = {*instance.ejected, *instance.quarantined}
    return Route(
        name=instance.name,
        model_id=instance.spec.model_id,
        wanted=instance.wanted,
        aliases=instance.spec.aliases,
        default=instance.spec.default,
        express=instance.spec.express,
        cache=instance.spec.cache,
        lacks_model=instance.lacks_model,
        sleeping=instance.sleeping,
        generation=instance.generation,
        falls_back=instance.falls_back,
        space=space_of(instance.spec, engine),
        replicas=tuple(replica for replica in replicas if replica.index not in without_traffic),
        ejected=tuple(replica for replica in replicas if replica.index in without_traffic),
    )


NO_ADDRESS = "nothing says at which address one is"
TIE_STRIDE = 7919  # a large prime: the beginnings are far from each other, however many replicas there are
DECIDING_FLAGS = ("--default-prompt", "--default-prompt-name", "--dense-path", "--runtime")


def space_of(spec: InstanceSpec, engine: str) -> tuple[tuple[str, str], ...]:
    """What decides the vectors of a model: two instances that differ in it must not answer one batch together."""
    own = {
        "model": spec.model_id,
        "pooling": spec.pooling,
        "dtype": spec.dtype,
        "revision": spec.revision,
        "engine": spec.engine or engine,
    }
    flags = {flag: spec.flag(flag) for flag in DECIDING_FLAGS}
    return tuple((name, value or "default") for name, value in {**own, **flags}.items())


class Target(NamedTuple):
    """Which instances may answer a call; exactly one of the first three is set.

    here: only those of this appliance, because another one asks.
    """

    instance_name: str | None = None
    model_id: str | None = None
    instance_index: int | None = None
    here: bool = False

    def __str__(self) -> str:
        if self.instance_name is not None:
            return f"instance {quoted(self.instance_name)}"
        if self.model_id is not None:
            return f"model {quoted(self.model_id)}"
        return f"instance index {self.instance_index}"


def routes_of(table: Table, target: Target) -> tuple[Route, ...]:
    """The instances that a target names, at least one.

    Raises: Problem invalid (empty name) or not_found, whose message lists what exists.
    """
    if target.instance_index is not None:
        if target.instance_index >= len(table.routes):
            raise not_found(f"{target} is out of range: there are {len(table.routes)} instances", table)
        return (table.routes[target.instance_index],)
    if target.instance_name is not None and not target.instance_name:
        raise empty("instance_name")
    if target.instance_name is None and not target.model_id:
        raise empty("model_id")
    ours = [route for route in table.routes if route.is_local] if target.here else table.routes
    routes = matching(ours, target) or (() if target.here else matching(table.elsewhere, target))
    if not routes:
        raise nobody(table, target)
    return routes


def matching(routes: Sequence[Route], target: Target) -> tuple[Route, ...]:
    """Those that a target names. An alias goes before the model that is called so."""
    if target.instance_name is not None:
        return tuple(route for route in routes if route.name == target.instance_name)
    aliased = tuple(route for route in routes if target.model_id in route.aliases)
    return aliased or tuple(route for route in routes if route.model_id == target.model_id)


def nobody(table: Table, target: Target) -> Problem:
    if target.instance_name is not None:
        hint = nearest(target.instance_name, [route.name for route in table.all])
        return not_found(f"Instance {quoted(target.instance_name)} not found{hint}", table)
    hint = nearest(target.model_id or "", {route.model_id for route in table.all})
    return not_found(f"No instance serves model {quoted(target.model_id)}{hint}", table)


def generations_of(table: Table, target: Target) -> tuple[tuple[str, int], ...]:
    """The instances that a target names, each with the generation of its spec; none where it names none."""
    try:
        return tuple((route.name, route.generation) for route in routes_of(table, target))
    except Problem:
        return ()


def candidates(table: Table, target: Target) -> tuple[Replica, ...]:
    """The replicas that may answer: those of the target's instances that are wanted running.

    Raises: Problem as `routes_of`; invalid when instances of a model differ in what decides its vectors, also of those
    that sleep, because which ones do is chance; precondition when all of them are stopped; Asleep when one of these
    sleeps; unavailable when all are ejected.
    """
    routes = routes_of(table, target)
    wanted = [route for route in routes if route.wanted == "running"]
    running = [route for route in wanted if not route.lacks_model]
    if wanted and not running:
        raise without_model(wanted)
    replicas = tuple(replica for route in running for replica in route.replicas)
    if target.model_id is not None:
        refuse_mixed(target.model_id, [*running, *(route for route in routes if route.sleeping)])
    if running and not replicas:
        away = not any(route.is_local for route in running)
        raise none_of((route.name for route in running), NO_ADDRESS if away else "")
    if not replicas and (asleep := [route.name for route in routes if route.sleeping]):
        raise Asleep(asleep[0])
    if not replicas:
        raise stopped(routes[0].name)
    return replicas


def refuse_mixed(model_id: str, routes: Sequence[Route]) -> None:
    """Raises: Problem AMBIGUOUS_MODEL unless all of them give the same vectors."""
    for route in routes[1:]:
        for (name, one), (_, other) in zip(routes[0].space, route.space, strict=True):
            if one != other:
                raise Problem(
                    Kind.INVALID,
                    "AMBIGUOUS_MODEL",
                    f'Model {quoted(model_id)} is served by "{routes[0].name}" with {name} {one} and by "{route.name}" '
                    f"with {name} {other}, whose vectors do not go together: ask for one of them by its name",
                )


def without_model(routes: Sequence[Route]) -> Problem:
    names = [route.name for route in routes]
    return Problem(
        Kind.UNAVAILABLE,
        "BACKEND_UNAVAILABLE",
        f"The model of {', '.join(map(quoted, names))} is not on this machine yet; GET /instances/{names[0]} says how "
        "far its download is",
    )


class Asleep(Problem):
    """An instance has no process until it is called, which it is now."""

    def __init__(self, name: str) -> None:
        message = f"No replica of {quoted(name)} is ready: it slept, and is waking up"
        super().__init__(Kind.UNAVAILABLE, "SLEEPING", message)
        self.name = name


def stopped(name: str) -> Problem:
    return Problem(
        Kind.PRECONDITION,
        "NOT_RUNNING",
        f'Instance "{name}" is stopped: start it with POST /instances/{name}/start',
    )


Choice = TypeVar("Choice")


def pick(
    ready: Sequence[Choice],
    load: Callable[[Choice], float],
    tie_number: int = 0,
    without: Container[Choice] = (),
    avoids: Callable[[Choice], bool] | None = None,
    admits: Callable[[Choice], bool] | None = None,
) -> Choice | None:
    """The one with the least load of replicas that are ready; None where none qualifies.

    tie_number: decides between equal loads; one that grows by one lets them take turns. without: never these.
    avoids: not those of which it is true, unless it is true of all. admits: only those of which it is true.
    """
    choices = [each for each in ready if each not in without] if without else ready
    if avoids:
        choices = [each for each in choices if not avoids(each)] or choices
    if admits:
        choices = [each for each in choices if admits(each)]
    if len(choices) < 2:
        return choices[0] if choices else None
    loads = [load(each) for each in choices]
    least = min(loads)
    idlest = [each for each, its_load in zip(choices, loads, strict=True) if its_load == least]
    return idlest[tie_number % len(idlest)]


def first_tie(multiplexer: int) -> int:
    """Where the ties of a multiplexer process begin: if all begin with the first replica, they meet there, and at each
    next one. A text took 2.3 times as long, with 16 of them before 200 idle replicas (`scripts/simulate.py`)."""
    return multiplexer * TIE_STRIDE


def none_ready(replicas: Sequence[Replica]) -> Problem:
    if not all(replica.is_local for replica in replicas):
        away = sorted(replica.address for replica in replicas)
        return none_of({replica.instance for replica in replicas}, f"nothing accepts calls at {', '.join(away[:5])}")
    return none_of(replica.instance for replica in replicas)


def none_of(instances: Iterable[str], why: str = "") -> Problem:
    names = sorted(set(instances))
    why = why or (f"it is starting, unhealthy, failed or not reachable; see GET /instances/{names[0]} and its logs")
    message = f"No replica of {', '.join(map(quoted, names))} is ready: {why}"
    return Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", message)


def missing_target() -> Problem:
    return invalid(
        "Missing target. No routing specified: set target.instance_name, target.model_id or target.instance_index"
    )


def empty(field: str) -> Problem:
    words = field.replace("_", " ").capitalize()
    return Problem(Kind.INVALID, "VALIDATION_ERROR", f"{words} cannot be empty: set target.{field}")


def not_found(message: str, table: Table) -> Problem:
    return Problem(Kind.NOT_FOUND, "INSTANCE_NOT_FOUND", message + table.listed)
