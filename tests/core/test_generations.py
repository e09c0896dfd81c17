"""Generations of one instance: what starts beside it, takes over, is kept, is given up."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import generations, repairs, rolling, sleep, state, state_toml
from appliance.core.generations import hindrance
from appliance.core.instance import InstanceSpec
from appliance.core.port_choice import Ports, choose_ports
from appliance.core.problems import Problem
from appliance.core.program import marker, programs_of
from appliance.core.routing import table_of
from appliance.core.state import Instance, State
from appliance.export.supervisord import instance_conf
from testing.specs import configured, spec

SETTINGS = configured()
NOW = "2026-01-01T00:00:00.000Z"
UNTIL = 1000.5


def existing(**fields: Any) -> State:
    return state.add(State(), spec("a", **fields), SETTINGS, (), NOW)


def begun(before: State, **fields: Any) -> State:
    wanted = replace(before.get("a").spec, **fields)
    ports = choose_ports(before.taken_ports, wanted, SETTINGS, ())
    return generations.begin(before, "a", wanted, ports, (), must_agree=True)


def taken_over(before: State, **fields: Any) -> State:
    after = begun(before, **fields)
    return generations.take_over(after, "a", successor(after).launch, UNTIL)


def successor(current: State) -> Instance:
    found = current.get("a").successor
    assert found is not None
    return found


def predecessor(current: State) -> Instance:
    found = current.get("a").predecessor
    assert found is not None
    return found


def test_a_successor_starts_beside_the_one_that_is_called() -> None:
    before = existing(replicas=2)
    after = begun(before, model_id="org/other")
    one, other = after.get("a"), successor(after)
    assert replace(one, successor=None, launches=0) == before.get("a")
    assert (other.generation, other.launch, other.process(1), other.must_agree) == (2, 2, "a@2-1", True)
    assert not {*one.ports, *one.prometheus_ports} & {*other.ports, *other.prometheus_ports}
    assert table_of(after, "127.0.0.1", "embedded") == table_of(before, "127.0.0.1", "embedded")
    names = [each.name for one in one.generations for each in programs_of(one, SETTINGS, "python", "id")]
    assert names == ["a-0", "a-1", "a@2-0", "a@2-1"]
    assert marker("id", "a", 0, one.launch) != marker("id", "a", 0, other.launch)


def test_it_takes_over_and_what_was_before_is_kept() -> None:
    before = existing()
    after = taken_over(before, model_id="org/other")
    one = after.get("a")
    assert (one.spec.model_id, one.generation, one.successor, one.unproved, one.must_agree) == (
        *("org/other", 2, None, False, False),
    )
    assert (predecessor(after).spec, predecessor(after).ports) == (before.get("a").spec, before.get("a").ports)
    assert (predecessor(after).kept_until, one.kept_until) == (UNTIL, 0.0)
    (route,) = table_of(after, "127.0.0.1", "embedded").routes
    assert (route.model_id, route.generation, route.replicas[0].port) == ("org/other", 2, one.ports[0])


def test_the_sections_are_the_same_before_and_after_it_takes_over() -> None:
    """No process is touched by it."""
    before = begun(existing(replicas=2), max_batch_tokens=4096)
    after = generations.take_over(before, "a", successor(before).launch, UNTIL)
    assert instance_conf(before.get("a"), SETTINGS, "python", "id") == instance_conf(
        after.get("a"), SETTINGS, "python", "id"
    )
    back = generations.undo(after, "a", UNTIL)
    assert instance_conf(back.get("a"), SETTINGS, "python", "id") == instance_conf(
        after.get("a"), SETTINGS, "python", "id"
    )


def test_another_launch_does_not_take_over() -> None:
    before = begun(existing(), max_batch_tokens=4096)
    assert generations.take_over(before, "a", 1, UNTIL) == before
    assert generations.take_over(before, "b", 2, UNTIL) == before
    after = generations.take_over(before, "a", 2, UNTIL)
    assert generations.take_over(after, "a", 2, UNTIL) == after


def test_an_undo_finds_the_processes_of_before() -> None:
    before = existing()
    back = generations.undo(taken_over(before, model_id="org/other"), "a", 2 * UNTIL)
    one = back.get("a")
    assert (one.spec, one.launch, one.ports, one.process(0)) == (
        *(before.get("a").spec, 1, before.get("a").ports, "a-0"),
    )
    assert one.generation == 3, "a batch that has seen all of it has to notice"
    assert (predecessor(back).spec.model_id, predecessor(back).kept_until) == ("org/other", 2 * UNTIL)
    forth = generations.undo(back, "a", UNTIL).get("a")
    assert (forth.spec.model_id, forth.launch, forth.generation) == ("org/other", 2, 4)


def test_an_undo_without_them_starts_new_ones() -> None:
    after = taken_over(existing(), model_id="org/other")
    cold = generations.drop(after, "a", predecessor(after).launch)
    back = generations.undo(cold, "a", UNTIL).get("a")
    assert (back.spec.model_id, back.launch, back.predecessor) == (existing().get("a").spec.model_id, 3, None)


def test_no_two_generations_have_a_launch_or_a_name_in_common() -> None:
    current = taken_over(existing(), max_batch_tokens=4096)
    for step in range(6):
        undone = step % 2
        current = generations.undo(current, "a", UNTIL) if undone else taken_over(current, max_batch_tokens=100 + step)
        every = current.get("a").generations
        assert len({each.launch for each in every}) == len({each.stem for each in every}) == len(every) == 2
    assert state.restart(current, "a").get("a").launch > max(each.launch for each in current.get("a").generations)


def test_what_does_not_come_up_leaves_the_one_that_is_called() -> None:
    before = existing()
    after = generations.drop(begun(before, model_id="org/other"), "a", 2, "it died")
    assert replace(after.get("a"), setback="", launches=0) == before.get("a")
    assert after.get("a").setback == "it died"
    assert begun(after, model_id="org/third").get("a").setback == ""
    assert generations.drop(before, "a", 1) == before, "the one that is called is none beside it"


@pytest.mark.parametrize("verb", ["begin", "scale", "replace_spec", "undo"])
def test_only_one_replacement_at_a_time(verb: str) -> None:
    before = begun(taken_over(existing(), max_batch_tokens=4096), max_batch_tokens=2048)
    one = before.get("a")
    ports = Ports(one.ports, one.prometheus_ports)
    verbs: dict[str, Any] = {
        "begin": lambda: generations.begin(before, "a", one.spec, ports, (), must_agree=False),
        "scale": lambda: generations.scale(before, "a", one.spec, ports, ()),
        "replace_spec": lambda: generations.replace_spec(before, "a", one.spec, ports, ()),
        "undo": lambda: generations.undo(before, "a"),
    }
    with pytest.raises(Problem, match='Generation 3 of "a" is just starting') as refused:
        verbs[verb]()
    assert refused.value.code == "REPLACEMENT_UNDER_WAY"


@pytest.mark.parametrize("end", [state.stop, sleep.sleep])
def test_who_ends_it_meanwhile_ends_all_and_the_change_holds(end: Any) -> None:
    after = end(begun(existing(), model_id="org/other"), "a").get("a")
    assert (after.spec.model_id, after.generations, after.falls_back) == ("org/other", (after,), True)
    assert after.previous is not None
    assert after.previous.spec == existing().get("a").spec
    kept = end(taken_over(existing(), model_id="org/other"), "a").get("a")
    assert (kept.spec.model_id, kept.generations) == ("org/other", (kept,))


def test_what_changes_at_once_holds_for_the_successor_too() -> None:
    after = generations.change(begun(existing(), model_id="org/other"), "a", {"cache": False})
    assert (after.get("a").spec.cache, successor(after).spec.cache) == (False, False)
    assert (after.get("a").spec.model_id, successor(after).spec.model_id) == (spec("a").model_id, "org/other")


def replaced(before: State, **fields: Any) -> State:
    """In place, and not proved yet."""
    one = before.get("a")
    ports = Ports(one.ports, one.prometheus_ports)
    return generations.replace_spec(before, "a", replace(one.spec, **fields), ports, ())


def test_what_changes_at_once_holds_for_the_one_that_may_come_back_too() -> None:
    """What a caller had been told is changed was as before, when the new generation did not start."""
    fields = {"aliases": ["embedder"], "token_ids": "refuse", "cache": False}
    changed = generations.change(replaced(existing(), max_batch_tokens=77), "a", fields)
    back = generations.fall_back(changed, "a", changed.get("a").launch, "it died").get("a").spec
    assert back == existing(**fields).get("a").spec
    assert back.aliases == ("embedder",)


def test_what_changes_at_once_is_undone_where_the_new_one_has_answered() -> None:
    after = replaced(existing(), max_batch_tokens=77)
    proved = generations.prove(after, "a", after.get("a").launch)
    changed = generations.change(proved, "a", {"cache": False})
    assert generations.undo(changed, "a").get("a").spec == existing().get("a").spec


def test_one_that_came_back_says_why() -> None:
    """The operator found the old fields, and no word about it."""
    after = replaced(existing(), max_batch_tokens=77)
    assert generations.fall_back(after, "a", 99, "it died") == after
    back = generations.fall_back(after, "a", after.get("a").launch, "it died").get("a")
    assert (back.spec, back.unproved) == (existing().get("a").spec, False)
    assert back.setback.endswith(": it died")


def read_again(current: State) -> State:
    return state_toml.load(state_toml.dump(current))


def fallen_back(current: State) -> Instance:
    return generations.fall_back(current, "a", current.get("a").launch, "it died").get("a")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_of_two_that_do_not_start_the_one_before_both_comes_back(is_stopped: bool) -> None:
    """The first of them came back, as if it had answered, and the one that had was nowhere any more."""
    before = state.stop(existing(), "a") if is_stopped else existing()
    twice = read_again(replaced(replaced(before, model_id="org/bad"), model_id="org/worse"))
    back = fallen_back(state.start(twice, "a") if is_stopped else twice)
    assert (back.spec, back.unproved) == (existing().get("a").spec, False)
    assert back.previous
    assert (back.previous.spec.model_id, back.previous.undone) == ("org/worse", True)


def test_a_successor_that_ended_before_it_took_over_is_none_to_go_back_to() -> None:
    stopped = state.stop(begun(existing(), model_id="org/bad"), "a")
    assert fallen_back(state.start(replaced(stopped, model_id="org/worse"), "a")).spec == existing().get("a").spec


def test_what_an_undo_brought_back_is_gone_back_to_though_it_has_not_answered_again() -> None:
    undone = read_again(generations.undo(replaced(existing(), model_id="org/bad"), "a"))
    assert (undone.get("a").spec, undone.get("a").unproved) == (existing().get("a").spec, True)
    assert fallen_back(replaced(undone, model_id="org/worse")).spec == existing().get("a").spec
    forth = generations.undo(undone, "a")
    assert forth.get("a").spec.model_id == "org/bad"
    assert fallen_back(replaced(forth, model_id="org/worse")).spec == existing().get("a").spec


def test_the_aliases_of_what_may_come_back_are_taken() -> None:
    """They were given away, and then it could not come back."""
    after = replaced(existing(aliases=["x"]), model_id="org/bad", aliases=())
    with pytest.raises(Problem, match='"x" already means instance "a"'):
        state.add(after, spec("b", aliases=["x"]), SETTINGS, (), NOW)
    proved = generations.prove(after, "a", after.get("a").launch)
    assert "b" in state.add(proved, spec("b", aliases=["x"]), SETTINGS, (), NOW).instances


def test_what_nobody_has_seen_is_not_what_wakes_after_a_restart_of_the_appliance() -> None:
    """It became what is called, without the look whether its vectors are those of the one before."""
    before = sleep.wake(existing(start="on_demand"), "a")
    after = sleep.sleep_on_demand(begun(before, model_id="org/other")).get("a")
    assert (after.spec, after.generations) == (before.get("a").spec, (after,))
    assert (after.sleeping, after.unproved, after.falls_back) == (True, False, False)
    assert "the appliance was restarted" in after.setback
    assert sleep.sleep_on_demand(before).get("a").setback == ""


def test_what_runs_always_goes_on_with_its_successor_after_a_restart_of_the_appliance() -> None:
    both = begun(existing(), model_id="org/other")
    assert sleep.sleep_on_demand(both) == both


def test_what_the_monitor_sees_is_noted_where_it_was_seen() -> None:
    before = begun(taken_over(existing(), max_batch_tokens=4096), max_batch_tokens=2048)
    for launch, place in ((2, "itself"), (3, "successor")):
        after = repairs.eject(before, "a", 0, launch, "why")
        one = after.get("a")
        where = {"itself": one, "successor": one.successor, "predecessor": one.predecessor}
        ejected = {name: dict(each.ejected) for name, each in where.items() if each}
        assert ejected == {name: {0: "why"} if name == place else {} for name in ejected}
        assert repairs.readmit(after, "a", 0, launch) == before
    assert repairs.eject(before, "a", 0, 99, "why") == before


def test_a_replacement_has_its_model() -> None:
    """Nobody replaces a spec by one whose model is not here: with the mark of the one before, nothing of it started."""
    before = existing()
    lacking = replace(before, instances={"a": replace(before.get("a"), lacks_model=True)})
    one = before.get("a")
    changed = generations.replace_spec(lacking, "a", spec("a"), Ports(one.ports, one.prometheus_ports), ()).get("a")
    assert not changed.lacks_model
    assert programs_of(changed, SETTINGS, "python", "id")[0].autostart


def test_replicas_come_and_go() -> None:
    before = repairs.quarantine(existing(replicas=2), "a", 1, 1, "why")
    one = before.get("a")
    more = generations.scale(
        before, "a", spec("a", replicas=3), Ports((*one.ports, 9001), (*one.prometheus_ports, 9002)), ()
    ).get("a")
    assert (more.launch, more.generation, len(more.ports), more.quarantined) == (1, 1, 3, {1: "why"})
    fewer = generations.scale(before, "a", spec("a"), Ports(one.ports[:1], one.prometheus_ports[:1]), ()).get("a")
    assert (fewer.launch, fewer.ports, fewer.quarantined) == (1, one.ports[:1], {})
    kept = [each for each in programs_of(more, SETTINGS, "python", "id") if each.name in ("a-0", "a-1")]
    assert kept == programs_of(one, SETTINGS, "python", "id")


def test_why_none_can_start_beside() -> None:
    running = existing(port=8200, prometheus_port=8800)
    assert "does not run" in hindrance(state.stop(running, "a").get("a"), spec("a"))
    assert "has not answered yet" in hindrance(replace(running.get("a"), unproved=True), spec("a"))
    for fields, words in (({"port": 8200}, "port 8200"), ({"port": 8199, "replicas": 2}, "port 8200")):
        assert words in hindrance(running.get("a"), spec("a", **fields))
    assert "port 8800" in hindrance(running.get("a"), spec("a", prometheus_port=8800))
    assert hindrance(running.get("a"), spec("a", port=8201)) == hindrance(running.get("a"), spec("a")) == ""


OF_ONE = st.sampled_from(["begin", "take_over", "undo", "drop", "stop", "start", "restart", "sleep", "wake", "scale"])


@given(st.lists(OF_ONE, max_size=14))
def test_whatever_is_asked_the_file_has_it_and_no_port_is_held_twice(verbs: list[str]) -> None:
    current = existing()
    seen: set[int] = set()
    gone: set[int] = set()
    for number, verb in enumerate(verbs):
        try:
            current = done(current, verb, number)
        except Problem as problem:
            if problem.code not in ("REPLACEMENT_UNDER_WAY", "NOTHING_TO_UNDO"):
                raise
        one = current.get("a")
        assert state_toml.load(state_toml.dump(current)) == current
        held = [port for each in one.generations for port in (*each.ports, *each.prometheus_ports)]
        assert len(set(held)) == len(held)
        launches = {each.launch for each in one.generations}
        assert not launches & gone, "a launch says which process it is"
        seen |= launches
        gone = seen - launches
        assert all(each.wanted == "running" for each in one.generations[1:])
        assert one.wanted == "running" or one.generations == (one,)


def done(current: State, verb: str, number: int) -> State:
    one = current.get("a")
    beside = [each.launch for each in (one.successor, one.predecessor) if each]
    if verb == "begin":
        return begun(current, max_batch_tokens=100 + number) if one.wanted == "running" else current
    if verb == "take_over":
        return generations.take_over(current, "a", beside[0] if beside else 99, UNTIL)
    if verb == "drop":
        return generations.drop(current, "a", beside[-1] if beside else 99)
    if verb == "scale":
        fewer = replace(one.spec, replicas=1)
        return generations.scale(current, "a", fewer, Ports(one.ports[:1], one.prometheus_ports[:1]), ())
    if verb == "undo":
        return generations.undo(current, "a", UNTIL)
    verbs: dict[str, Any] = {"stop": state.stop, "start": state.start, "restart": state.restart}
    changed: State = (verbs | {"sleep": sleep.sleep, "wake": sleep.wake})[verb](current, "a")
    return changed


def test_a_file_whose_generations_are_no_such_is_refused() -> None:
    table = state_toml.dump(begun(existing(), max_batch_tokens=4096))
    for wrong in ({"name": "b"}, {"series": 1}):
        (entry,) = table["instances"]
        damaged = {**table, "instances": [{**entry, "successor": {**entry["successor"], **wrong}}]}
        with pytest.raises(ValueError, match="no other generation"):
            state_toml.load(damaged)


def test_at_the_start_of_the_appliance_nothing_is_kept_for_an_undo() -> None:
    both = taken_over(existing(), max_batch_tokens=4096)
    after = generations.without_predecessors(both).get("a")
    assert after.generations == (after,)
    assert after.previous is not None
    assert isinstance(after.previous.spec, InstanceSpec)
    started = begun(existing(), max_batch_tokens=4096)
    assert generations.without_predecessors(started) == started


def test_what_an_earlier_release_has_given_away_since_is_not_there_any_more() -> None:
    both = begun(existing(), max_batch_tokens=4096)
    port = successor(both).ports[0]
    table = state_toml.dump(both)
    restarted = {**table, "instances": [{**table["instances"][0], "launch": 2}]}
    assert state_toml.load(restarted).get("a").successor is None
    (other,) = state_toml.dump(state.add(State(), spec("b", port=port, prometheus_port=9500), SETTINGS, (), NOW))[
        "instances"
    ]
    created = {**table, "count": 2, "instances": [*table["instances"], other]}
    assert state_toml.load(created).get("a").successor is None
    assert state_toml.load(created).get("b").ports == (port,)


def test_no_launch_is_given_twice() -> None:
    given_up = generations.drop(begun(existing(), max_batch_tokens=4096), "a", 2, "it died")
    again = successor(begun(given_up, max_batch_tokens=4096))
    assert (again.launch, again.stem) == (3, "a@3")
    back = generations.undo(taken_over(existing(), max_batch_tokens=4096), "a", UNTIL)
    cold = generations.drop(back, "a", predecessor(back).launch)
    assert state.restart(cold, "a").get("a").launch == 3


def test_what_the_monitor_saw_of_a_replica_that_went_counts_no_more() -> None:
    one = existing(replicas=2).get("a")
    fewer = generations.scale(existing(replicas=2), "a", spec("a"), Ports(one.ports[:1], one.prometheus_ports[:1]), ())
    assert repairs.eject(fewer, "a", 1, 1, "why") == repairs.quarantine(fewer, "a", 1, 1, "why") == fewer
    assert rolling.roll(fewer, "a", 1, {0: 7, 1: 8}).get("a").rolling == {0: 7}


def test_aliases_of_a_successor_are_taken() -> None:
    both = begun(existing(), aliases=("x",), max_batch_tokens=4096)
    with pytest.raises(Problem, match='"x" already means instance "a"'):
        state.add(both, spec("b", aliases=["x"]), SETTINGS, (), NOW)
