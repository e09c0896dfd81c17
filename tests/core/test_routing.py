"""Routing: all three kinds of target, what each error says, and that equal replicas are used in turn."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import routing, sleep, state
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Table, Target
from appliance.core.state import State
from testing.specs import LAW, configured, spec


def built(*specs: tuple[str, str, int], stopped: tuple[str, ...] = ()) -> Table:
    current = State()
    for name, model, replicas in specs:
        current = state.add(current, spec(name, model_id=model, replicas=replicas), configured(), (), "now")
    for name in stopped:
        current = state.stop(current, name)
    return routing.table_of(current, "127.0.0.1", "embedded")


INSTANCES = [("zeta", "org/one", 1), ("alpha", "org/two", 2), ("mid", "org/one", 2), ("off", "org/off", 1)]
TABLE = built(*INSTANCES, stopped=("off",))


def names(target: Target, table: Table = TABLE) -> list[tuple[str, int]]:
    return [(replica.instance, replica.index) for replica in routing.candidates(table, target)]


def problem_of(target: Target, table: Table = TABLE) -> Problem:
    with pytest.raises(Problem) as caught:
        routing.candidates(table, target)
    return caught.value


def test_by_name() -> None:
    assert names(Target(instance_name="alpha")) == [("alpha", 0), ("alpha", 1)]


def test_by_model_over_all_its_instances() -> None:
    assert sorted(names(Target(model_id="org/one"))) == [("mid", 0), ("mid", 1), ("zeta", 0)]


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ({"pooling": "mean"}, {"pooling": "cls"}, "pooling mean"),
        ({"dtype": "float16"}, {}, "dtype float16"),
        ({"revision": "abc"}, {}, "revision abc"),
        ({}, {"engine": "tei"}, "engine embedded"),
        ({"extra_args": ["--default-prompt", "query: "]}, {}, "--default-prompt query: "),
        ({"extra_args": ["--runtime=openvino"]}, {"extra_args": ["--runtime=torch"]}, "--runtime openvino"),
    ],
)
def test_a_model_whose_instances_give_different_vectors_is_ambiguous(one: Any, other: Any, differs: str) -> None:
    current = State()
    for name, fields in (("one", one), ("other", other)):
        current = state.add(current, spec(name, model_id="org/one", **fields), configured(), (), "now")
    table = routing.table_of(current, "127.0.0.1", "embedded")
    problem = problem_of(Target(model_id="org/one"), table)
    assert (problem.kind, problem.code) == (Kind.INVALID, "AMBIGUOUS_MODEL")
    assert f'"one" with {differs}' in problem.message
    assert names(Target(instance_name="one"), table) == [("one", 0)]
    halted = routing.table_of(state.stop(current, "other"), "127.0.0.1", "embedded")
    assert names(Target(model_id="org/one"), halted) == [("one", 0)]
    for asleep in (["other"], ["one"], ["one", "other"]):  # which of them sleep is chance
        sleepy = current
        for name in asleep:
            sleepy = sleep.sleep(sleepy, name)
        table = routing.table_of(sleepy, "127.0.0.1", "embedded")
        assert problem_of(Target(model_id="org/one"), table).code == "AMBIGUOUS_MODEL"


def test_what_does_not_decide_vectors_may_differ() -> None:
    current = State()
    for name, fields in (("one", {"engine": "embedded"}), ("other", {"max_batch_tokens": 99, "replicas": 2})):
        current = state.add(current, spec(name, model_id="org/one", **fields), configured(), (), "now")
    assert len(names(Target(model_id="org/one"), routing.table_of(current, "127.0.0.1", "embedded"))) == 3


@pytest.mark.parametrize(("index", "name"), enumerate(["alpha", "mid", "off", "zeta"]))
def test_by_position_in_the_name_sorted_list(index: int, name: str) -> None:
    assert routing.routes_of(TABLE, Target(instance_index=index))[0].name == name


def test_each_replica_has_its_own_address() -> None:
    addresses = [replica.address for route in TABLE.routes for replica in route.replicas]
    assert len(set(addresses)) == 6
    assert all(address.startswith("127.0.0.1:8") for address in addresses)


@pytest.mark.parametrize(
    "target",
    [
        Target(instance_name="alhpa"),
        Target(instance_name="ALPHA"),
        Target(instance_name="org/two"),
        Target(model_id="alpha"),
        Target(model_id="org/tow"),
        Target(instance_index=4),
        Target(instance_index=2**32 - 1),
    ],
    ids=str,
)
def test_what_is_not_found_lists_what_exists(target: Target) -> None:
    problem = problem_of(target)
    assert problem.kind == Kind.NOT_FOUND
    assert all(name in problem.message for name in ("alpha", "mid", "off", "zeta", "org/one", "org/two"))


def test_a_near_miss_is_suggested() -> None:
    assert 'did you mean "alpha"' in problem_of(Target(instance_name="alhpa")).message
    assert 'did you mean "org/two"' in problem_of(Target(model_id="org/tow")).message


def test_nothing_at_all_is_not_found() -> None:
    for target in (Target(instance_name="a"), Target(model_id="a"), Target(instance_index=0)):
        assert problem_of(target, Table()).kind == Kind.NOT_FOUND


def test_a_message_stays_short_and_printable_whatever_was_asked() -> None:
    problem = problem_of(Target(instance_name="\n\x1b[31m" + "x" * 10_000))
    assert problem.message.isprintable()
    assert len(problem.message) < 1000


@pytest.mark.parametrize("target", [Target(instance_name=""), Target(model_id=""), Target()], ids=repr)
def test_an_empty_target_is_invalid(target: Target) -> None:
    assert problem_of(target).kind == Kind.INVALID


@pytest.mark.parametrize("target", [Target(instance_name="off"), Target(model_id="org/off"), Target(instance_index=2)])
def test_a_stopped_instance_is_a_precondition_with_the_way_out(target: Target) -> None:
    problem = problem_of(target)
    assert problem.kind == Kind.PRECONDITION
    assert "/instances/off/start" in problem.message


def test_a_model_is_served_by_those_instances_that_run() -> None:
    table = built(("a", "m", 1), ("b", "m", 1), stopped=("a",))
    assert names(Target(model_id="m"), table) == [("b", 0)]


def test_none_ready_is_unavailable_at_once_and_says_where_to_look() -> None:
    with pytest.raises(Problem, match="/instances/alpha") as caught:
        raise routing.none_ready(routing.candidates(TABLE, Target(instance_name="alpha")))
    assert caught.value.kind == Kind.UNAVAILABLE


REPLICAS = st.integers(1, 8).map(lambda count: built(("a", "m", count)).routes[0].replicas)


@LAW
@given(REPLICAS, st.data(), st.integers(0, 2**40))
def test_the_least_loaded_ready_replica_answers(replicas: tuple[Replica, ...], data: st.DataObject, turn: int) -> None:
    loads = data.draw(st.lists(st.integers(0, 3), min_size=len(replicas), max_size=len(replicas)))
    ready = data.draw(st.sets(st.integers(0, len(replicas) - 1), min_size=1))
    chosen = routing.pick([one for one in replicas if one.index in ready], lambda one: loads[one.index], turn)
    assert chosen
    assert chosen.index in ready
    assert loads[chosen.index] == min(loads[index] for index in ready)


@LAW
@given(REPLICAS, st.integers(1, 50), st.integers(0, 2**40))
def test_ties_go_round(replicas: tuple[Replica, ...], picks: int, first: int) -> None:
    chosen = [routing.pick(replicas, lambda _: 7, first + number) for number in range(picks)]
    counts = Counter(one and one.index for one in chosen)
    spread = [counts[replica.index] for replica in replicas]
    assert max(spread) - min(spread) <= 1


@LAW
@given(REPLICAS, st.data(), st.integers(1, 60))
def test_ties_among_the_best_go_round_too(replicas: tuple[Replica, ...], data: st.DataObject, rounds: int) -> None:
    """Some replicas are busier: the idle ones still share the calls evenly, as `pick` promises for ties."""
    busy = data.draw(st.sets(st.integers(0, len(replicas) - 1), max_size=len(replicas) - 1))
    idle = [replica for replica in replicas if replica.index not in busy]
    turns = rounds * len(replicas) * len(idle)
    chosen = [routing.pick(replicas, lambda one: one.index in busy, turn) for turn in range(turns)]
    counts = Counter(one and one.index for one in chosen)
    assert set(counts) == {replica.index for replica in idle}
    assert max(counts.values()) == min(counts.values())


INDICES = st.sets(st.integers(0, 7))


@LAW
@given(REPLICAS, INDICES, INDICES, INDICES)
def test_excluded_replicas_are_never_picked_and_avoided_ones_only_where_there_is_no_other(
    replicas: tuple[Replica, ...], excluded: set[int], avoided: set[int], admitted: set[int]
) -> None:
    chosen = routing.pick(
        replicas,
        load=lambda one: -one.index,
        without=[one for one in replicas if one.index in excluded],
        avoids=lambda one: one.index in avoided,
        admits=lambda one: one.index in admitted,
    )
    left = [one.index for one in replicas if one.index not in excluded]
    preferred = [index for index in left if index not in avoided] or left
    assert (chosen.index if chosen else None) == max(set(preferred) & admitted, default=None)


@pytest.mark.parametrize("replicas", [2, 3, 8, 200])
def test_multiplexers_begin_at_different_replicas(replicas: int) -> None:
    begun = {routing.first_tie(number) % replicas for number in range(min(replicas, 16))}
    assert routing.first_tie(0) == 0
    assert len(begun) == min(replicas, 16)
