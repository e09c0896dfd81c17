"""Who gives way for an instance that is to start."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.problems import Kind, Problem
from appliance.core.room import HOST, MIB, Tenant, evicted, short, with_what_leaves

GPU = "GPU 0"


def tenant(name: str, mib: int, last_used: float = 0.0, **fields: Any) -> Tenant:
    return Tenant(name, {HOST: mib * MIB}, **{"on_demand": True, **fields}, last_used=last_used)


def gives_way(free: int, need: int, *tenants: Tenant) -> tuple[str, ...]:
    return evicted("new", {HOST: need * MIB}, {HOST: free * MIB}, tenants)


def test_nobody_gives_way_where_there_is_room() -> None:
    assert gives_way(100, 100, tenant("a", 50)) == ()


def test_the_one_that_was_used_longest_ago_goes_first() -> None:
    assert gives_way(0, 50, tenant("late", 50, 9.0), tenant("early", 50, 1.0), tenant("mid", 50, 5.0)) == ("early",)
    assert gives_way(0, 60, tenant("late", 50, 9.0), tenant("early", 50, 1.0), tenant("mid", 50, 5.0)) == (
        *("early", "mid"),
    )


def test_a_small_one_that_a_larger_one_makes_needless_stays() -> None:
    assert gives_way(0, 80, tenant("small", 10, 1.0), tenant("large", 90, 2.0)) == ("large",)


def test_neither_an_eager_one_nor_one_at_work_gives_way() -> None:
    eager, busy = tenant("eager", 50, on_demand=False), tenant("busy", 50, busy=True)
    assert gives_way(0, 50, eager, busy, tenant("idle", 50, 9.0)) == ("idle",)


def test_while_calls_are_in_work_it_is_asked_again() -> None:
    with pytest.raises(Problem) as refused:
        gives_way(10, 50, tenant("busy", 50, busy=True))
    assert (refused.value.kind, refused.value.code) == (Kind.UNAVAILABLE, "NO_ROOM")
    assert '"new" needs 50 MiB of memory, and 40 MiB are missing' in refused.value.message


def test_where_even_all_would_not_do_the_refusal_lists_what_there_is() -> None:
    with pytest.raises(Problem) as refused:
        gives_way(0, 50, tenant("eager", 70, on_demand=False), tenant("idle", 40))
    assert (refused.value.kind, refused.value.code) == (Kind.INVALID, "INSUFFICIENT_MEMORY")
    assert "eager 70, idle 40" in refused.value.message


def test_only_who_has_what_is_missing_gives_way() -> None:
    elsewhere = tenant("elsewhere", 90, 1.0)
    there = Tenant("there", {GPU: 30 * MIB}, on_demand=True, last_used=2.0)
    assert evicted("new", {GPU: 20 * MIB}, {GPU: 5 * MIB, HOST: 0}, [elsewhere, there]) == ("there",)


def test_nobody_is_put_to_sleep_for_one_while_one_before_it_is_short_of_the_same() -> None:
    idle = tenant("idle", 50)
    assert evicted("new", {HOST: 50 * MIB}, {}, [idle]) == ("idle",)
    with pytest.raises(Problem) as refused:
        evicted("new", {HOST: 50 * MIB}, {}, [idle], ahead=[{HOST: 20 * MIB}])
    assert (refused.value.kind, refused.value.code) == (Kind.UNAVAILABLE, "NO_ROOM")
    assert "Others who wait for that came first" in refused.value.message
    with pytest.raises(Problem) as refused:
        evicted("new", {HOST: 60 * MIB}, {}, [idle], ahead=[{HOST: 20 * MIB}])
    assert refused.value.code == "INSUFFICIENT_MEMORY", "in vain, whoever comes first"


def test_what_would_do_for_one_before_is_left_to_it() -> None:
    free, idle = {HOST: 50 * MIB}, tenant("idle", 30)
    assert evicted("new", {HOST: 20 * MIB}, free, [idle], ahead=[{HOST: 30 * MIB}]) == ()
    assert evicted("new", {HOST: 21 * MIB}, free, [idle], ahead=[{HOST: 30 * MIB}]) == ("idle",)


def test_who_fits_passes_those_who_do_not() -> None:
    """And who needs another place: a large model that waits for long calls to end holds up nobody else."""
    free = {HOST: 50 * MIB, GPU: 0, "GPU 1": 0}
    idle = Tenant("idle", {"GPU 1": 40 * MIB}, on_demand=True)
    busy = Tenant("busy", {HOST: 100 * MIB, GPU: 40 * MIB}, on_demand=True, busy=True)
    large = {HOST: 60 * MIB, GPU: 40 * MIB}
    assert evicted("new", {HOST: 50 * MIB, "GPU 1": 40 * MIB}, free, [idle, busy], ahead=[large]) == ("idle",)


AMOUNTS = st.dictionaries(st.sampled_from([HOST, GPU, "GPU 1"]), st.integers(0, 50), max_size=3)
TENANTS = st.lists(
    st.tuples(AMOUNTS, st.booleans(), st.booleans(), st.integers(0, 9)).map(lambda each: each), max_size=6
).map(lambda rows: [Tenant(f"t{number}", *row[:3], last_used=row[3]) for number, row in enumerate(rows)])


@given(demands=st.lists(AMOUNTS, min_size=1, max_size=4), free=AMOUNTS, tenants=TENANTS)
def test_whoever_is_let_in_before_takes_nothing_from_those_who_came_first(
    demands: list[dict[str, int]], free: dict[str, int], tenants: list[Tenant]
) -> None:
    """Whoever fits still does when the last one has begun, and nothing that one before lacks is freed for it."""
    *ahead, demand = demands
    by_name = {each.name: each for each in tenants}
    try:
        names = evicted("new", demand, free, tenants, ahead)
    except Problem:
        return
    left = dict(free)
    for each in ahead:
        if missing := short(left, each):
            assert not names or missing.keys().isdisjoint(short(left, demand))
        else:
            left = {place: amount - each.get(place, 0) for place, amount in left.items()}
    assert not short(with_what_leaves(left, [by_name[name] for name in names]), demand)


@given(demand=AMOUNTS, free=AMOUNTS, tenants=TENANTS)
def test_what_leaves_is_enough_and_none_too_many(
    demand: dict[str, int], free: dict[str, int], tenants: list[Tenant]
) -> None:
    by_name = {each.name: each for each in tenants}
    idle = [each for each in tenants if each.on_demand and not each.busy]
    try:
        names = evicted("new", demand, free, tenants)
    except Problem:
        assert short(with_what_leaves(free, idle), demand)
        return
    leaving = [by_name[name] for name in names]
    assert all(each in idle for each in leaving)
    assert not short(with_what_leaves(free, leaving), demand)
    for each in leaving:
        assert short(with_what_leaves(free, [other for other in leaving if other is not each]), demand)
