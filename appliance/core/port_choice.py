"""The ports of an instance: those that it asks for, or the lowest free ones of the ranges in the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from appliance.core.instance import InstanceSpec
from appliance.core.problems import invalid
from appliance.core.settings import Settings

PROMETHEUS_PORTS = 1000  # how far above prometheus_port_start a free port is looked for


class Ports(NamedTuple):
    """Of all replicas of an instance."""

    ports: tuple[int, ...]
    prometheus_ports: tuple[int, ...]


def choose_ports(taken: Mapping[int, str], spec: InstanceSpec, settings: Settings, busy: Collection[int]) -> Ports:
    """The ports that were asked for, checked, or the first free ones. taken: by other instances, whose they are.

    Raises: Problem PORT_CONFLICT or PORT_ALLOCATION_FAILED.
    """
    asked = [range(first, first + spec.replicas) for first in (spec.port, spec.asked_prometheus_port) if first]
    for port in (port for ports in asked for port in ports):
        refuse_conflict(port, taken, settings, busy)
    unusable = {*taken, *settings.own_ports, *busy, *(port for ports in asked for port in ports)}
    if spec.port is not None:
        ports = tuple(range(spec.port, spec.port + spec.replicas))
    else:
        ports = free_ports(spec.replicas, settings.instance_port_start, settings.instance_port_end, unusable)
    unusable.update(ports)
    if (asked_first := spec.asked_prometheus_port) is not None:
        return Ports(ports, tuple(range(asked_first, asked_first + spec.replicas)))
    first = settings.prometheus_port_start
    return Ports(ports, free_ports(spec.replicas, first, min(first + PROMETHEUS_PORTS, 65536), unusable))


def choose_ports_again(
    current: Ports,
    before: InstanceSpec,
    spec: InstanceSpec,
    taken: Mapping[int, str],
    settings: Settings,
    busy: Collection[int],
) -> Ports:
    """The ports of an instance whose spec becomes another one: as far as they were chosen, those that it has, unless
    they are asked for now.

    taken: by other instances; busy: as for `choose_ports`, those of the instance itself included.
    """
    own = {*current.ports, *current.prometheus_ports}
    others = set(busy) - own
    firsts = (spec.port, spec.asked_prometheus_port)
    asked = {port for first in firsts if first for port in range(first, first + spec.replicas)}
    for port in sorted(asked):
        refuse_conflict(port, taken, settings, others)
    unusable = {*taken, *settings.own_ports, *others, *own, *asked}
    first = settings.prometheus_port_start
    ranges = (
        (spec.port, before.port, current.ports, settings.instance_port_start, settings.instance_port_end),
        (
            *(spec.asked_prometheus_port, before.asked_prometheus_port, current.prometheus_ports),
            *(first, min(first + PROMETHEUS_PORTS, 65536)),
        ),
    )
    chosen: list[tuple[int, ...]] = []
    for asks, asked_before, ports, start, end in ranges:
        if asks is not None:
            chosen.append(tuple(range(asks, asks + spec.replicas)))
            continue
        kept = [None if port in asked else port for port in ports[: spec.replicas]] if asked_before is None else []
        kept += [None] * (spec.replicas - len(kept))
        missing = kept.count(None)
        more = iter(free_ports(missing, start, end, unusable) if missing else ())
        chosen.append(tuple(next(more) if port is None else port for port in kept))
        unusable.update(chosen[-1])
    return Ports(*chosen)


def refuse_conflict(port: int, taken: Mapping[int, str], settings: Settings, busy: Collection[int]) -> None:
    if port in settings.own_ports:
        raise invalid(f"Port {port} is the appliance's own {settings.own_ports[port]}: choose another", "PORT_CONFLICT")
    if port in taken:
        raise invalid(f'Port {port} already in use by instance "{taken[port]}": choose another', "PORT_CONFLICT")
    if port in busy:
        raise invalid(f"Port {port} is in use by another program on this machine: choose another", "PORT_CONFLICT")


def free_ports(count: int, start: int, end: int, unusable: Collection[int]) -> tuple[int, ...]:
    """The lowest ``count`` ports in [start, end) that no instance and no other program holds."""
    if start == end:
        raise invalid(
            "Port auto-allocation is disabled (instance_port_start equals instance_port_end): give a port",
            "PORT_ALLOCATION_FAILED",
        )
    free = tuple(port for port in range(start, end) if port not in unusable)[:count]
    if len(free) < count:
        raise invalid(
            f"Could not find free port in range [{start}, {end}) for {count} replica(s): delete an instance, or "
            "widen the range",
            "PORT_ALLOCATION_FAILED",
        )
    return free


def candidate_ports(spec: InstanceSpec, settings: Settings) -> list[range]:
    """The ports that ``choose_ports`` may look at, so that the caller can ask the machine which of them are busy."""
    count, asked = spec.replicas, spec.asked_prometheus_port
    serve = range(settings.instance_port_start, settings.instance_port_end)
    metrics = range(settings.prometheus_port_start, min(settings.prometheus_port_start + PROMETHEUS_PORTS, 65536))
    return [
        serve if spec.port is None else range(spec.port, spec.port + count),
        metrics if asked is None else range(asked, asked + count),
    ]
