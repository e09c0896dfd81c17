"""Whose memory is given up for an instance that is to start, where there is not enough for all.

Theory of operation. A `Place` is something of which there is so much: the memory that the appliance may use
(`memory_limit_mb`), and that of each GPU. An instance that starts makes a demand on some of them. Where a place has not
so much left, instances that run on demand are put to sleep, the one that was used longest ago first, and none that has
a call in work; what they leave has to be enough, or nobody is put to sleep.

    what is known                                          then
    there is room                                          nobody
    idle ones on demand leave enough                       these, as few as are needed, least recently used first
    on demand ones would, but calls are in work; or        NO_ROOM (unavailable): a call waits and asks again
    some are just ending
    even all of them would not                             INSUFFICIENT_MEMORY, with what is there and what each takes

Those who wait stand in a line (`node.waiting_line`). For one of them nobody is put to sleep at a place of which one
before it is short too, and what would do for one before it is left to that one. Who is short of nothing passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.core.problems import Kind, Problem, quoted

MIB = 1024**2
HOST = "memory"  # the place that memory_limit_mb bounds
Amounts = Mapping[str, int]  # bytes by place
LISTED = 20
IN_WORK = "Calls are in work at what could be put to sleep, or it is just ending"
OTHERS_FIRST = "Others who wait for that came first"


@dataclass(frozen=True)
class Tenant:
    """An instance that runs. takes: all its replicas together. last_used: seconds since 1970.

    ending: it is about to leave its room by itself.
    """

    name: str
    takes: Amounts
    on_demand: bool = False
    busy: bool = False
    ending: bool = False
    last_used: float = 0.0


def short(free: Amounts, demand: Amounts) -> dict[str, int]:
    """The bytes that are missing, by place."""
    return {place: need - free.get(place, 0) for place, need in demand.items() if need > free.get(place, 0)}


def evicted(
    name: str, demand: Amounts, free: Amounts, tenants: Sequence[Tenant], ahead: Iterable[Amounts] = ()
) -> tuple[str, ...]:
    """The instances that sleep from now on, so that ``name`` can start; none where there is room.

    free: before. tenants: the others. ahead: the demands of those who wait and came first.

    Raises: Problem NO_ROOM, or INSUFFICIENT_MEMORY.
    """
    idle = sorted(
        (each for each in tenants if each.on_demand and not (each.busy or each.ending)), key=lambda each: each.last_used
    )
    left, contested = left_by(ahead, free)
    unused, chosen = left, list[Tenant]()
    is_first = contested.isdisjoint(short(left, demand))
    for tenant in idle if is_first else ():
        missing = short(left, demand)
        if any(tenant.takes.get(place) for place in missing):
            chosen.append(tenant)
            left = with_what_leaves(left, [tenant])
    if missing := short(left, demand):
        asleep = with_what_leaves(free, [each for each in tenants if each.on_demand or each.ending])
        for_now = IN_WORK if is_first else OTHERS_FIRST
        raise no_room(name, demand, missing, tenants, "" if short(asleep, demand) else for_now)
    for tenant in list(chosen):  # one that came first may not be needed beside a larger one behind it
        rest = with_what_leaves(unused, [each for each in chosen if each is not tenant])
        if not short(rest, demand):
            chosen.remove(tenant)
    return tuple(tenant.name for tenant in chosen)


def left_by(ahead: Iterable[Amounts], free: Amounts) -> tuple[dict[str, int], set[str]]:
    """What is free behind those who came first, and the places of which one of them is short."""
    left, contested = dict(free), set[str]()
    for demand in ahead:
        if missing := short(left, demand):
            contested.update(missing)
        else:
            left = {place: amount - demand.get(place, 0) for place, amount in left.items()}
    return left, contested


def with_what_leaves(free: Amounts, leaving: Sequence[Tenant]) -> dict[str, int]:
    left = dict(free)
    for tenant in leaving:
        for place, taken in tenant.takes.items():
            left[place] = left.get(place, 0) + taken
    return left


def no_room(name: str, demand: Amounts, missing: Amounts, tenants: Sequence[Tenant], for_now: str) -> Problem:
    """for_now: why that may change; empty where it will not."""
    place = max(missing, key=lambda each: missing[each])
    there = sorted((each for each in tenants if each.takes.get(place)), key=lambda each: -each.takes[place])
    listed = ", ".join(f"{each.name} {each.takes[place] // MIB}" for each in there[:LISTED]) or "nothing"
    words = (
        f"{quoted(name)} needs {demand[place] // MIB} MiB of {place}, and {-(-missing[place] // MIB)} MiB are missing; "
        f"there is, in MiB: {listed}"
    )
    if for_now:
        return Problem(Kind.UNAVAILABLE, "NO_ROOM", f"{words}. {for_now}")
    return Problem(
        Kind.INVALID,
        "INSUFFICIENT_MEMORY",
        f"{words}. Stop one of them, let it start on demand, or raise what may be used (memory_limit_mb)",
    )
