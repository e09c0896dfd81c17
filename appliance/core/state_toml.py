"""The state as the plain values of a TOML file, and back.

What a file has beyond our own fields, at the top or of an instance, is a newer release's: it is carried along in
`extra` and written back unchanged, so that going back a release and forth again loses nothing. Our own must be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from appliance.core import fields as check
from appliance.core.instance import CHECKS, InstanceSpec, gpu
from appliance.core.moving_in import is_foreign
from appliance.core.problems import Problem, quoted
from appliance.core.state import Instance, Previous, State


def checked_reasons(value: Any) -> Mapping[int, str]:
    """`{"0" = "why"}` in the file; a reason may have several lines."""
    table = check.table(value)
    if not all(key.isascii() and key.isdigit() and isinstance(reason, str) for key, reason in table.items()):
        raise ValueError("must have a reason for each replica's number")
    return {int(key): reason for key, reason in table.items()}


def checked_pids(value: Any) -> Mapping[int, int]:
    """`{"0" = 4711}` in the file."""
    table = check.table(value)
    if not all(key.isascii() and key.isdigit() for key in table):
        raise ValueError("must have a process for each replica's number")
    return {int(key): check.whole(0, 2**62)(pid) for key, pid in table.items()}


def checked_words(value: Any) -> str:
    """They may have several lines."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


STATE_CHECKS: dict[str, check.Check] = {
    "ports": check.sequence_of(check.whole(1024, 65535), 64),
    "prometheus_ports": check.sequence_of(check.whole(1024, 65535), 64),
    "created_at": check.text(64),
    "wanted": check.one_of("running", "stopped"),
    "launch": check.whole(1, 2**62),
    "restarts": check.whole(0, 2**62),
}
REASONS = {"withheld": "ejected", "quarantined": "quarantined"}  # key in the file -> field of `Instance`
TOP = ("generation", "count", "seeded", "instances")
FLAGS = ("lacks_model", "unproved", "must_agree")  # in the file only where they are true
# In the file only where they are not what they are by default.
OPTIONAL: dict[str, check.Check] = {
    "generation": check.whole(1, 2**62),
    "series": check.whole(1, 2**62),
    "launches": check.whole(0, 2**62),
    "kept_until": check.number(0, 2**62),
    "setback": check.Check(checked_words),
    "placed": check.sequence_of(gpu, 64),
    "rolling": check.Check(checked_pids),
}
BESIDE = ("successor", "predecessor")
OWN = (*CHECKS, *STATE_CHECKS, *REASONS, *OPTIONAL, *FLAGS, *BESIDE, "previous", "sleeping")
DEFAULTS = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(Instance)
}


def dump(state: State) -> dict[str, Any]:
    """Plain values for TOML: absent instead of None, because TOML has no null."""
    return {
        **state.extra,
        "generation": state.generation,
        "count": len(state.instances),  # a file that was cut between two tables is still TOML
        "seeded": sorted(state.seeded),
        "instances": [dump_instance(instance) for instance in state.instances.values()],
    }


def dump_instance(instance: Instance) -> dict[str, Any]:
    """Reasons and GPUs are absent where there are none."""
    reasons = {key: getattr(instance, name) for key, name in REASONS.items()}
    return {
        **instance.extra,
        **{key: value for key, value in instance.spec.mapping().items() if value is not None},
        **{key: plain(getattr(instance, key)) for key in STATE_CHECKS},
        **{key: {str(replica): why for replica, why in each.items()} for key, each in reasons.items() if each},
        **({"sleeping": instance.launch} if instance.sleeping else {}),
        **{key: plain(getattr(instance, key)) for key in OPTIONAL if getattr(instance, key) != DEFAULTS[key]},
        **({"previous": dump_previous(instance.previous)} if instance.previous else {}),
        **{key: True for key in FLAGS if getattr(instance, key)},
        **{place: dump_instance(each) for place in BESIDE if (each := getattr(instance, place))},
    }


def dump_previous(previous: Previous) -> dict[str, Any]:
    return {
        **{key: value for key, value in previous.spec.mapping().items() if value is not None},
        "ports": list(previous.ports),
        "prometheus_ports": list(previous.prometheus_ports),
        **({"placed": list(previous.placed)} if previous.placed else {}),
        **({"undone": True} if previous.undone else {}),
    }


def load_previous(table: Mapping[str, Any]) -> Previous:
    ports = {key: taken(table, key, STATE_CHECKS[key]) for key in ("ports", "prometheus_ports")}
    spec = InstanceSpec.parse({key: table[key] for key in CHECKS if key in table})
    placed = taken({"placed": [], **table}, "placed", OPTIONAL["placed"])
    return Previous(spec, placed=placed, undone=taken({"undone": False, **table}, "undone", check.boolean), **ports)


def taken(table: Mapping[str, Any], key: str, checked: Callable[[Any], Any]) -> Any:
    """A value that must be there. Raises: ValueError, which names the key."""
    if key not in table:
        raise ValueError(f'"{key}" is missing')
    try:
        return checked(table[key])
    except ValueError as error:
        raise ValueError(f'"{key}" {error}') from None


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


Known = dict[str, tuple[str, Instance]]  # by name: what the file had of an instance, and what that is


def load(table: Mapping[str, Any], known: Known | None = None) -> State:
    """The state in a parsed file. Raises ValueError or Problem when it is not one: nothing is guessed.

    known: what was made of the file before; it becomes that of this one. Of a hundred instances a change leaves all but
    one as they were, and each of our programs reads the file after each change: 10 ms.
    """
    if is_foreign(table):
        raise ValueError("it is tei-manager's, which `appliance up` takes over")
    tables = taken({"instances": [], **table}, "instances", check.sequence_of(check.table, 100_000))
    known = {} if known is None else known
    entries = [load_known(entry, known) for entry in tables]
    for gone in set(known) - {each.name for each in entries}:
        known.pop(gone, None)
    instances = without_clashes(entries)
    if len(instances) != table.get("count"):
        raise ValueError(f"it has {len(instances)} instances and says {table.get('count')}")
    if len({instance.name for instance in instances}) < len(instances):
        raise ValueError("two instances have one name")
    every = [each for instance in instances for each in instance.generations]
    ports = [port for each in every for port in (*each.ports, *each.prometheus_ports)]
    if len(set(ports)) < len(ports):
        raise ValueError("two replicas hold one port")
    return State(
        generation=taken(table, "generation", check.whole(0, 2**62)),
        instances=dict(sorted((each.name, each) for each in instances)),
        seeded=frozenset(taken({"seeded": [], **table}, "seeded", check.sequence_of(check.text(64), 100_000))),
        extra=check.beyond(table, TOP),
    )


def load_known(entry: Mapping[str, Any], known: Known) -> Instance:
    before, text = known.get(str(entry.get("name"))), repr(entry)  # as values 1 and true would be equal
    if before and before[0] == text:
        return before[1]
    try:
        instance = load_instance(entry)
    except (ValueError, Problem) as error:
        raise ValueError(f"instance {quoted(entry.get('name', ''))}: {error}") from None
    known[instance.name] = text, instance
    return instance


def without_clashes(instances: list[Instance]) -> list[Instance]:
    """An earlier release knows nothing of the generations beside an instance, and may have given their ports and
    launches away since. Then they are gone: their processes have ended with its start."""
    held = {port for each in instances for port in (*each.ports, *each.prometheus_ports)}

    def stays(instance: Instance, other: Instance | None) -> Instance | None:
        if other is None or other.launch == instance.launch:
            return None
        return None if held & {*other.ports, *other.prometheus_ports} else other

    def alone(each: Instance) -> Instance:
        if each.successor is None and each.predecessor is None:
            return each
        return replace(each, successor=stays(each, each.successor), predecessor=stays(each, each.predecessor))

    return [alone(each) for each in instances]


def load_beside(table: Mapping[str, Any], entry: Mapping[str, Any]) -> Instance:
    """Another generation of the instance in ``entry``, beside which there is none in its turn."""
    other = load_instance({key: value for key, value in table.items() if key not in BESIDE})
    if other.name != entry["name"] or other.series == entry.get("series", 1):
        raise ValueError("it has no other generation of its own beside it")
    return other


def load_instance(entry: Mapping[str, Any]) -> Instance:
    values = {key: taken(entry, key, checked) for key, checked in STATE_CHECKS.items()}
    values |= {name: taken(entry, key, checked_reasons) for key, name in REASONS.items() if key in entry}
    values |= {key: taken(entry, key, checked) for key, checked in OPTIONAL.items() if key in entry}
    values |= {key: taken(entry, key, check.boolean) for key in FLAGS if key in entry}
    values |= {place: load_beside(taken(entry, place, check.table), entry) for place in BESIDE if place in entry}
    if "previous" in entry:
        values["previous"] = load_previous(taken(entry, "previous", check.table))
    # Where an earlier release has started it since, and stopped it again, it is stopped.
    values["sleeping"] = values["wanted"] == "stopped" and entry.get("sleeping") == values["launch"]
    spec = InstanceSpec.parse({key: entry[key] for key in CHECKS if key in entry})
    instance = Instance(spec=spec, **values, extra=check.beyond(entry, OWN))
    # On a cluster it has no ports of this machine.
    if not len(instance.ports) == len(instance.prometheus_ports) or len(instance.ports) not in (0, spec.replicas):
        raise ValueError("it has not one port pair per replica")
    return instance
