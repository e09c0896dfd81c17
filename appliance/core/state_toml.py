"""The state as the plain values of a TOML file, and back.

What a file has beyond our own fields, at the top or of an instance, is a newer release's: it is carried along in
`extra` and written back unchanged, so that going back a release and forth again loses nothing. Our own must be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from appliance.core import fields as check
from appliance.core.instance import CHECKS, InstanceSpec, gpu
from appliance.core.moving_in import is_foreign
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
PLACED = check.sequence_of(gpu, 64)
TOP = ("generation", "count", "seeded", "instances")
FLAGS = ("lacks_model", "unproved", "must_agree")  # in the file only where they are true
# In the file only where they are not what they are by default.
OPTIONAL: dict[str, check.Check] = {
    "generation": check.whole(1, 2**62),
    "series": check.whole(1, 2**62),
    "launches": check.whole(0, 2**62),
    "kept_until": check.number(0, 2**62),
    "setback": check.Check(checked_words),
}
BESIDE = ("successor", "predecessor")
OWN = (*CHECKS, *STATE_CHECKS, *REASONS, *OPTIONAL, *FLAGS, *BESIDE, "placed", "rolling", "previous", "sleeping")
DEFAULTS = {each.name: each.default for each in fields(Instance)}


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
        **({"placed": list(instance.placed)} if instance.placed else {}),
        **({"sleeping": instance.launch} if instance.sleeping else {}),
        **{key: getattr(instance, key) for key in OPTIONAL if getattr(instance, key) != DEFAULTS[key]},
        **({"previous": dump_previous(instance.previous)} if instance.previous else {}),
        **({"rolling": {str(each): pid for each, pid in instance.rolling.items()}} if instance.rolling else {}),
        **{key: True for key in FLAGS if getattr(instance, key)},
        **{place: dump_instance(each) for place in BESIDE if (each := getattr(instance, place))},
    }


def dump_previous(previous: Previous) -> dict[str, Any]:
    return {
        **{key: value for key, value in previous.spec.mapping().items() if value is not None},
        "ports": list(previous.ports),
        "prometheus_ports": list(previous.prometheus_ports),
        **({"placed": list(previous.placed)} if previous.placed else {}),
    }


def load_previous(table: Mapping[str, Any]) -> Previous:
    ports = {key: STATE_CHECKS[key](table[key]) for key in ("ports", "prometheus_ports")}
    spec = InstanceSpec.parse({key: table[key] for key in CHECKS if key in table})
    return Previous(spec, placed=PLACED(table["placed"]) if "placed" in table else (), **ports)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


Known = dict[str, tuple[str, Instance]]  # by name: what the file had of an instance, and what that is


def load(table: Mapping[str, Any], known: Known | None = None) -> State:
    """The state in a parsed file. Raises ValueError or Problem when it is not one: nothing is guessed.

    known: what was made of the file before; it becomes that of this one. Of a hundred instances a change leaves all but
    one as they were, and each of our programs reads the file after each change: 10 ms.
    """
    if is_foreign(table):
        raise ValueError("it is tei-manager's, which `appliance up` takes over")
    tables = check.sequence_of(check.table, 100_000)(table.get("instances", []))
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
        generation=check.whole(0, 2**62)(table.get("generation")),
        instances=dict(sorted((each.name, each) for each in instances)),
        seeded=frozenset(check.sequence_of(check.text(64), 100_000)(table.get("seeded", []))),
        extra=check.beyond(table, TOP),
    )


def load_known(entry: Mapping[str, Any], known: Known) -> Instance:
    before, text = known.get(str(entry.get("name"))), repr(entry)  # as values 1 and true would be equal
    if before and before[0] == text:
        return before[1]
    instance = load_instance(entry)
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
        raise ValueError(f"instance {entry['name']!r} has no other generation of its own beside it")
    return other


def load_instance(entry: Mapping[str, Any]) -> Instance:
    values = {key: checked(entry[key]) for key, checked in STATE_CHECKS.items()}
    values |= {name: checked_reasons(entry[key]) for key, name in REASONS.items() if key in entry}
    if "placed" in entry:
        values["placed"] = PLACED(entry["placed"])
    values |= {key: checked(entry[key]) for key, checked in OPTIONAL.items() if key in entry}
    values |= {place: load_beside(check.table(entry[place]), entry) for place in BESIDE if place in entry}
    if "previous" in entry:
        values["previous"] = load_previous(check.table(entry["previous"]))
    if "rolling" in entry:
        values["rolling"] = checked_pids(entry["rolling"])
    values |= {key: check.boolean(entry[key]) for key in FLAGS if key in entry}
    # Where an earlier release has started it since, and stopped it again, it is stopped.
    values["sleeping"] = values["wanted"] == "stopped" and entry.get("sleeping") == values["launch"]
    spec = InstanceSpec.parse({key: entry[key] for key in CHECKS if key in entry})
    instance = Instance(spec=spec, **values, extra=check.beyond(entry, OWN))
    # On a cluster it has no ports of this machine.
    if not len(instance.ports) == len(instance.prometheus_ports) or len(instance.ports) not in (0, spec.replicas):
        raise ValueError(f"instance {spec.name!r} has not one port pair per replica")
    return instance
