"""A listing: instances whose replicas run somewhere else, and where these listen.

A person writes it for `directory = "static:FILE"` or `"dns:FILE"`; what became of its names is kept as a listing, too.

    [[instances]]
    name = "minilm"
    model_id = "sentence-transformers/all-MiniLM-L6-v2"
    addresses = ["10.0.0.5:8080", "gpu2.example:8080"]

    resolved with     a name stands for
    static            one replica, at the first of its addresses
    dns               a replica at each of its addresses: a headless Service of Kubernetes

An instance is described by the fields of `InstanceSpec` that say what its replicas compute; what says how to start them
means nothing here, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.core import fields as check
from appliance.core.addresses import Address, host_and_port
from appliance.core.cachekey import Fingerprint
from appliance.core.instance import CHECKS, InstanceSpec
from appliance.core.problems import Problem, invalid, quoted
from appliance.core.routing import Replica, Table, route_of
from appliance.core.state import Instance, State, refuse_taken_names, with_instance

DESCRIBING = (
    *("name", "model_id", "revision", "pooling", "dtype", "engine", "max_batch_tokens", "max_concurrent_requests"),
    *("extra_args", "token_ids", "aliases", "default", "cache"),
)
TASKS = ("embedding", "sparse", "multivector", "reranker", "classifier")
MOST_ADDRESSES = 10_000
ARRIVALS = ("starting", "sleeping", "failed")
UNKNOWN_GENERATION = 0
UNKNOWN_TIME = "1970-01-01T00:00:00Z"


CHECKED: dict[str, check.Check] = {
    **{name: CHECKS[name] for name in DESCRIBING},
    "addresses": check.sequence_of(host_and_port, MOST_ADDRESSES),
    "server_names": check.sequence_of(check.text(253, shortest=0), MOST_ADDRESSES),
    "task": check.one_of(*TASKS),
    "fingerprint": check.Check(lambda value: fingerprint_of(value)),
    "arrival": check.one_of(*ARRIVALS),
}
FIELDS = check.Fields(CHECKED, required=("name", "model_id", "addresses"))
# Required: a file that an editor has just emptied is not a listing of nothing. That is `instances = []`.
TOP = check.Fields(
    {"instances": check.sequence_of(check.table, 10_000)}, required=("instances",), unknown="Unknown key {}"
)


def fingerprint_of(value: Any) -> Fingerprint:
    parts = check.table(value)
    if not all(isinstance(word, str) for word in (*parts, *parts.values())):
        raise ValueError("must be a table of texts")
    return Fingerprint(tuple(sorted(parts.items())))


@dataclass(frozen=True)
class Listed:
    """An instance of a listing. server_names: for each address, the name that its certificate has to bear; its own
    host where that is empty. task: where it is known, what the model does. fingerprint: of its vectors, where known.
    arrival: of one on a cluster, what becomes of it while it has no replica; else empty."""

    spec: InstanceSpec
    addresses: tuple[Address, ...]
    server_names: tuple[str, ...] = ()
    task: str | None = None
    fingerprint: Fingerprint | None = None
    arrival: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def named(self) -> tuple[tuple[Address, str], ...]:
        """Each address with the name that its certificate has to bear."""
        names = self.server_names or ("",) * len(self.addresses)
        return tuple((each, name or each.host) for each, name in zip(self.addresses, names, strict=True))


Listing = tuple[Listed, ...]


def parse(content: Any) -> Listing:
    """The instances of a listing in name order. Raises: Problem (invalid) that names the entry and its fault."""
    tables = TOP.values(check.required_object(content, "A listing must be a table"))["instances"]
    listing = []
    names = State()
    for place, table in enumerate(tables):
        try:
            listed = parse_one(table)
            if listed.name in names.instances:
                raise invalid("is there twice: a name has one instance")
            refuse_taken_names(names, listed.spec)
        except Problem as problem:
            name = quoted(table["name"]) if "name" in table else "without a name"
            raise invalid(f"instances[{place}] ({name}): {problem.message}") from None
        names = with_instance(names, instance_of(listed))
        listing.append(listed)
    return tuple(sorted(listing, key=lambda each: each.name))


def parse_peers(content: Any) -> Listing:
    """What a peer says, which may be of another release: fields that we do not know are left out, and so is an instance
    that we cannot read. Raises: Problem for what is no listing at all."""
    tables = check.required_object(content, "A listing must be a table").get("instances")
    if not isinstance(tables, list):
        raise invalid(f'Field "instances" must be a list, not {check.shown(tables)}')
    found: dict[str, Listed] = {}
    for table in tables:
        try:
            listed = parse_one({key: value for key, value in check.table(table).items() if key in CHECKED})
        except (Problem, ValueError):
            continue
        found.setdefault(listed.name, listed)
    if tables and not found:
        raise invalid("None of its instances can be read")
    return tuple(found[name] for name in sorted(found))


def parse_one(table: Mapping[str, Any]) -> Listed:
    values = FIELDS.values(table)
    spec = InstanceSpec(**{key: value for key, value in values.items() if key in DESCRIBING})
    addresses, names = values["addresses"], values.get("server_names", ())
    if len(set(addresses)) < len(addresses):
        raise invalid('Field "addresses" has one twice: each is a replica')
    if names and len(names) != len(addresses):
        raise invalid(f'Field "server_names" has {len(names)} for {len(addresses)} addresses: one for each, or none')
    return Listed(spec, addresses, names, values.get("task"), values.get("fingerprint"), values.get("arrival", ""))


def dump(listing: Listing) -> dict[str, Any]:
    """The values of a TOML file that `parse` reads; only what differs from the defaults."""
    return {"instances": [dumped(listed) for listed in listing]}


def dumped(listed: Listed) -> dict[str, Any]:
    defaults = InstanceSpec(listed.name, listed.spec.model_id).mapping()
    given = {key: value for key, value in listed.spec.mapping().items() if key in DESCRIBING}
    table = {key: value for key, value in given.items() if key in ("name", "model_id") or value != defaults[key]}
    optional = {
        "server_names": list(listed.server_names),
        "task": listed.task,
        "arrival": listed.arrival,
        "fingerprint": dict(listed.fingerprint.parts) if listed.fingerprint else None,
    }
    addresses = {"addresses": [str(each) for each in listed.addresses]}
    return {**table, **addresses, **{key: value for key, value in optional.items() if value}}


def of_peers(listing: Listing, peers: Collection[Address]) -> Listing:
    """What these peers have of a listing of peers. One that is a peer no more may be in it: it gets neither calls nor
    our key."""
    kept = []
    for listed in listing:
        places = [(address, name) for address, name in listed.named if (name, address.port) in peers]
        if places:
            addresses, names = zip(*places, strict=True)
            kept.append(replace(listed, addresses=addresses, server_names=names))
    return tuple(kept)


def instance_of(listed: Listed) -> Instance:
    """As the state has those of this machine; it has no ports here."""
    spec = replace(listed.spec, replicas=max(1, len(listed.addresses)))
    instance = Instance(spec, ports=(), prometheus_ports=(), created_at=UNKNOWN_TIME, generation=UNKNOWN_GENERATION)
    sleeps = listed.arrival == "sleeping" and not listed.addresses
    return replace(instance, wanted="stopped", sleeping=True) if sleeps else instance


def state_of(listing: Sequence[Listed]) -> State:
    return State(instances={listed.name: instance_of(listed) for listed in listing})


class Numbers:
    """The number of each replica: an address keeps its own, whatever comes and goes beside it."""

    def __init__(self) -> None:
        self.given: dict[str, dict[Address, int]] = {}

    def of(self, listed: Listed) -> dict[Address, int]:
        before = self.given.get(listed.name, {})
        kept = {each: before[each] for each in listed.addresses if each in before}
        free = (number for number in range(len(listed.addresses)) if number not in set(kept.values()))
        fresh = {each: next(free) for each in listed.addresses if each not in kept}
        self.given[listed.name] = {**kept, **fresh}
        return self.given[listed.name]


def table_of(listing: Sequence[Listed], engine: str, numbers: Numbers, are_peers: bool = False) -> Table:
    """The routes to the instances of a listing; they are wanted running, all of them. are_peers: its addresses are
    those of appliances."""
    routes = (route_of(instance_of(each), replicas_of(each, numbers, are_peers), engine) for each in listing)
    return Table(tuple(replace(route, arrival=each.arrival) for route, each in zip(routes, listing, strict=True)))


def replicas_of(listed: Listed, numbers: Numbers, are_peers: bool) -> tuple[Replica, ...]:
    given = numbers.of(listed)
    replicas = [
        Replica(
            instance=listed.name,
            index=given[address],
            address=str(address),
            model_id=listed.spec.model_id,
            launch=1,
            capacity=listed.spec.max_concurrent_requests,
            server_name=name,
            is_peer=are_peers,
        )
        for address, name in listed.named
    ]
    return tuple(sorted(replicas, key=lambda replica: replica.index))
