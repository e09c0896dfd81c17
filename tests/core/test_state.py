"""State: every verb is a pure change, ports never collide, seeds are added once, and a file holds all of it."""

import tomllib
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import generations, port_choice, rolling, sleep, state, state_toml
from appliance.core.instance import InstanceSpec
from appliance.core.port_choice import Ports
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.core.state import State
from testing.specs import LAW, configured, given_specs, spec

NOW = "2026-01-01T00:00:00.000Z"
DEFAULTS = configured()


def grown(*specs: InstanceSpec, settings: Settings = DEFAULTS, busy: frozenset[int] = frozenset()) -> State:
    current = State()
    for asked in specs:
        current = state.add(current, asked, settings, busy, NOW)
    return current


def code_of(change: Any, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(Problem) as caught:
        change(*arguments)
    return caught.value.kind, caught.value.code


def ports_of(current: State) -> list[int]:
    return [port for held in current.instances.values() for port in (*held.ports, *held.prometheus_ports)]


# -- verbs ------------------------------------------------------------------------------------------------------------


def test_a_new_instance_shall_run_and_has_the_first_ports() -> None:
    one = grown(spec("one")).get("one")
    assert (one.wanted, one.launch, one.restarts, one.created_at) == ("running", 1, 0, NOW)
    assert (one.ports, one.prometheus_ports) == ((8080,), (8700,))


def test_every_replica_has_its_own_ports() -> None:
    many = grown(spec("many", replicas=3), spec("fixed", replicas=3, port=20000, prometheus_port=21000))
    assert len(set(ports_of(many))) == 12
    assert many.get("fixed").ports == (20000, 20001, 20002)
    assert many.get("fixed").prometheus_ports == (21000, 21001, 21002)


def test_a_second_instance_of_one_name_conflicts() -> None:
    assert code_of(state.add, grown(spec()), spec(), DEFAULTS, (), NOW) == (Kind.CONFLICT, "INSTANCE_EXISTS")


def test_names_are_told_apart_by_case() -> None:
    assert list(grown(spec("b"), spec("B"), spec("a")).instances) == ["B", "a", "b"]


def test_no_more_than_max_instances() -> None:
    two = configured(max_instances=2)
    full = grown(spec("a"), spec("b"), settings=two)
    assert code_of(state.add, full, spec("c"), two, (), NOW) == (Kind.INVALID, "MAX_INSTANCES_REACHED")
    assert "c" in state.add(state.remove(full, "a"), spec("c"), two, (), NOW).instances


def test_stop_is_remembered_and_start_lifts_it() -> None:
    running = grown(spec("a"))
    stopped = state.stop(running, "a")
    assert stopped.get("a").wanted == "stopped"
    again = state.start(stopped, "a").get("a")
    assert (again.wanted, again.restarts) == ("running", 0)
    assert again.launch > running.get("a").launch


def test_start_and_restart_always_make_a_new_launch() -> None:
    current = grown(spec("a"))
    for verb in (state.start, state.restart, state.stop, state.restart, state.start, state.start):
        after = verb(current, "a")
        assert after.get("a").launch == current.get("a").launch + (verb is not state.stop)
        assert after.get("a").restarts == current.get("a").restarts + (verb is state.restart)
        assert after.get("a").wanted == ("stopped" if verb is state.stop else "running")
        current = after


def test_no_verb_touches_other_instances_or_the_state_it_was_given() -> None:
    before = grown(spec("a"), spec("b"))
    picture = state_toml.dump(before)
    for verb in (state.start, state.stop, state.restart):
        assert verb(before, "a").get("b") == before.get("b")
    assert list(state.remove(before, "a").instances) == ["b"]
    assert state_toml.dump(before) == picture


@pytest.mark.parametrize("verb", [state.start, state.stop, state.restart, state.remove, State.get])
def test_an_unknown_name_lists_what_exists(verb: Any) -> None:
    with pytest.raises(Problem, match=r'"bets" not found.*"beta".*alpha, beta') as caught:
        verb(grown(spec("alpha"), spec("beta")), "bets")
    assert (caught.value.kind, caught.value.code) == (Kind.NOT_FOUND, "INSTANCE_NOT_FOUND")


def test_removed_ports_are_given_again() -> None:
    assert ports_of(state.add(state.remove(grown(spec("a")), "a"), spec("b"), DEFAULTS, (), NOW)) == [8080, 8700]


# -- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"port": 9000}, "api_port"),
        ({"prometheus_port": 9001}, "grpc_port"),
        ({"port": 8999, "replicas": 4}, "api_port"),
        ({"port": 8080}, '"first"'),
        ({"port": 8078, "replicas": 3}, '"first"'),
        ({"prometheus_port": 8080}, '"first"'),
        ({"port": 8700}, '"first"'),
        ({"port": 7777}, "7777"),
        ({"prometheus_port": 7776, "replicas": 2}, "7777"),
    ],
)
def test_an_asked_port_that_somebody_holds_is_a_conflict(asked: dict[str, int], why: str) -> None:
    with pytest.raises(Problem, match=why) as caught:
        state.add(grown(spec("first")), spec("second", **asked), DEFAULTS, {7777}, NOW)
    assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "PORT_CONFLICT")


def test_busy_and_own_ports_are_skipped() -> None:
    narrow = configured(instance_port_start=8998, instance_port_end=9005, prometheus_port_start=9000)
    held = grown(spec("a", replicas=2), settings=narrow, busy=frozenset({8998}))
    assert held.get("a").ports == (8999, 9003)
    assert held.get("a").prometheus_ports == (9004, 9005)


def test_automatic_ports_leave_the_asked_one_of_the_same_instance_free() -> None:
    held = grown(spec("a", prometheus_port=8080)).get("a")
    assert held.ports == (8081,)


def test_the_range_is_used_to_its_end_and_not_beyond() -> None:
    three = configured(instance_port_start=8080, instance_port_end=8083)
    full = grown(spec("a"), spec("b"), spec("c"), settings=three)
    assert sorted(port for held in full.instances.values() for port in held.ports) == [8080, 8081, 8082]
    assert code_of(state.add, full, spec("d"), three, (), NOW) == (Kind.INVALID, "PORT_ALLOCATION_FAILED")
    assert code_of(state.add, State(), spec("d", replicas=4), three, (), NOW)[1] == "PORT_ALLOCATION_FAILED"


def test_an_empty_range_means_that_ports_must_be_given() -> None:
    off = configured(instance_port_start=8080, instance_port_end=8080)
    assert code_of(state.add, State(), spec(), off, (), NOW) == (Kind.INVALID, "PORT_ALLOCATION_FAILED")
    assert grown(spec(port=8080), settings=off).get("a").ports == (8080,)


NARROW = configured(instance_port_start=8990, instance_port_end=9012, prometheus_port_start=9003)
SMALL_PORTS = st.none() | st.integers(8985, 9030)
STEPS = st.lists(
    st.tuples(st.integers(0, 9), SMALL_PORTS, SMALL_PORTS, st.integers(1, 4), st.frozensets(st.integers(8985, 9030))),
    max_size=25,
)


@LAW
@given(STEPS)
def test_no_sequence_of_adds_and_deletes_gives_one_port_twice(steps: list[tuple[Any, ...]]) -> None:
    current = State()
    for number, port, prometheus_port, replicas, busy in steps:
        if f"i{number}" in current.instances:
            current = state.remove(current, f"i{number}")
            continue
        try:
            asked = spec(f"i{number}", port=port, prometheus_port=prometheus_port, replicas=replicas)
        except Problem:
            continue  # its own two rows overlap
        looked_at = set(chain(*port_choice.candidate_ports(asked, NARROW)))
        seen_busy = busy & looked_at  # all that the caller ever asks the machine about
        refusal = None
        try:
            current = state.add(current, asked, NARROW, seen_busy, NOW)
        except Problem as problem:
            refusal = problem.code
        if refusal:
            assert refusal in ("PORT_CONFLICT", "PORT_ALLOCATION_FAILED")
            continue
        held = current.get(f"i{number}")
        assert len(held.ports) == len(held.prometheus_ports) == replicas
        assert not {*held.ports, *held.prometheus_ports} & busy
        assert port is None or held.ports == tuple(range(port, port + replicas))
        assert prometheus_port is None or held.prometheus_ports[0] == prometheus_port
        assert port is not None or all(8990 <= given < 9012 for given in held.ports)
        assert len(set(ports_of(current))) == len(ports_of(current))
        assert not set(ports_of(current)) & {9000, 9001, 9002}


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_is_added_once_and_a_deleted_one_stays_deleted() -> None:
    once = state.seed(State(), spec("s"), DEFAULTS, (), NOW)
    assert list(once.instances) == ["s"]
    assert state.seed(once, spec("s"), DEFAULTS, (), "later") == once
    deleted = state.remove(once, "s")
    assert state.seed(deleted, spec("s"), DEFAULTS, (), NOW) == deleted
    assert list(state.seed(deleted, spec("t"), DEFAULTS, (), NOW).instances) == ["t"]


def test_a_seed_never_changes_the_instance_that_is_there() -> None:
    mine = state.stop(grown(spec("s", replicas=2)), "s")
    seeded = state.seed(mine, spec("s", replicas=7), DEFAULTS, (), NOW)
    assert seeded.get("s") == mine.get("s")
    gone = state.remove(seeded, "s")
    assert state.seed(gone, spec("s"), DEFAULTS, (), NOW) == gone


def test_a_seed_that_cannot_be_added_is_not_counted_as_added() -> None:
    full = configured(max_instances=1)
    one = grown(spec("a"), settings=full)
    assert code_of(state.seed, one, spec("s"), full, (), NOW)[1] == "MAX_INSTANCES_REACHED"
    assert "s" in state.seed(state.remove(one, "a"), spec("s"), full, (), NOW).instances


def test_a_deleted_seed_stays_deleted_through_the_file() -> None:
    deleted = state.remove(state.seed(State(), spec("s"), DEFAULTS, (), NOW), "s")
    assert state.seed(through_toml(deleted), spec("s"), DEFAULTS, (), NOW).instances == {}


# -- the file ---------------------------------------------------------------------------------------------------------


def through_toml(current: State) -> State:
    return state_toml.load(tomllib.loads(tomli_w.dumps(state_toml.dump(current))))


@LAW
@given(st.lists(given_specs(), max_size=3), st.sets(st.text("abc-_", min_size=1, max_size=5)), st.integers(0, 2**40))
def test_a_state_comes_back_from_its_file(bodies: list[dict[str, Any]], seeded: set[str], generation: int) -> None:
    current = State()
    for index, body in enumerate(bodies):
        plain = {key: value for key, value in body.items() if key not in ("port", "prometheus_port")}
        plain["replicas"] = min(plain.get("replicas", 1), 8)
        current = state.add(current, InstanceSpec.parse({**plain, "name": f"i{index}"}), DEFAULTS, (), NOW)
        for verb in [state.restart, state.stop][: index + 1]:
            current = verb(current, f"i{index}")
    current = replace(current, seeded=frozenset(seeded), generation=generation)
    assert through_toml(current) == current
    assert list(through_toml(current).instances) == sorted(current.instances)


@LAW
@given(st.lists(st.tuples(st.sampled_from(["add", "restart", "stop", "remove"]), st.sampled_from("abc")), max_size=12))
def test_a_file_that_follows_another_is_read_as_if_it_were_the_first(steps: list[tuple[str, str]]) -> None:
    """What has not changed is not read again."""
    current, known = State(), state_toml.Known()
    for verb, name in steps:
        before = state_toml.load(state_toml.dump(current), known)
        if verb == "add" and name not in current.instances:
            current = state.add(current, spec(name), DEFAULTS, (), NOW)
        elif verb != "add" and name in current.instances:
            current = getattr(state, verb)(current, name)
        table = tomllib.loads(tomli_w.dumps(state_toml.dump(current)))
        loaded = state_toml.load(table, known)
        assert loaded == current == state_toml.load(table)
        assert set(known) == set(current.instances)
        assert all(loaded.get(each) is before.get(each) for each in {*loaded.instances, *before.instances} - {name})


def test_a_value_of_another_type_is_not_taken_for_the_same() -> None:
    table, known = state_toml.dump(grown(spec("a"))), state_toml.Known()
    state_toml.load(table, known)
    (entry,) = table["instances"]
    with pytest.raises(ValueError, match="not true"):
        state_toml.load({**table, "instances": [{**entry, "launch": True}]}, known)


HEALTHY = state_toml.dump(replace(grown(spec("a", replicas=2), spec("b")), seeded=frozenset({"a"}), generation=5))
UNREADABLE = (ValueError, KeyError, Problem)  # what the state file driver takes for damage


def damaged(**entry: Any) -> dict[str, Any]:
    """The healthy state with changed keys in its first instance; `...` leaves one out."""
    first, second = HEALTHY["instances"]
    return {
        **HEALTHY,
        "instances": [{key: value for key, value in {**first, **entry}.items() if value is not ...}, second],
    }


def test_the_healthy_one_is_healthy() -> None:
    assert state_toml.dump(state_toml.load(HEALTHY)) == HEALTHY


@pytest.mark.parametrize(
    "entry",
    [
        *[{key: ...} for key in ("name", "model_id", "ports", "prometheus_ports", "created_at", "wanted", "launch")],
        *[{"name": name} for name in ("b", "control", "", 7, "a\nb")],
        *[{"ports": ports} for ports in ([], [8080], [8080, 8081, 8082], ["8080", "8081"], 8080, [0, 1])],
        *[{"replicas": replicas} for replicas in (1, 3, 0, "2")],
        *[{"wanted": wanted} for wanted in ("paused", "", True, 1)],
        *[{"launch": launch} for launch in (0, -1, "1", 1.0, True)],
        *[{"restarts": restarts} for restarts in (-1, "0", ...)],
        *[{"extra_args": arguments} for arguments in (["--port", "1"], "x", [1])],
        {"created_at": 7},
    ],
    ids=repr,
)
def test_a_damaged_instance_is_named_and_what_is_wrong_with_it(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'^instance "[^"]*": |^two instances have one name$') as caught:
        state_toml.load(damaged(**entry))
    (key,) = entry
    assert any(words in str(caught.value) for words in (f'"{key}"', "one port pair per replica", "two instances"))


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "5"},
        {"generation": -1},
        {"generation": True},
        {"generation": None},
        {"seeded": "ab"},
        {"seeded": [1]},
        {"instances": "ab"},
        {"instances": 5},
        {"instances": True},
        {"instances": 1.5},
        {"instances": {"a": {}}},
        {"instances": {}},
        {"instances": [5]},
        {"instances": ["a"]},
    ],
    ids=repr,
)
def test_of_a_damaged_file_the_field_is_named(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ValueError, match=f'^"{key}" must be '):
        state_toml.load({**HEALTHY, **change})


def test_what_a_newer_release_has_written_is_carried_along() -> None:
    newer = {**damaged(unheard_of={"a": [1]}), "tenants": ["b"]}
    loaded = state_toml.load(newer)
    assert state_toml.dump(state.restart(loaded, "b"))["tenants"] == ["b"]
    assert state_toml.dump(loaded) == newer
    assert loaded != state_toml.load({**newer, "tenants": ["c"]})


def test_an_empty_file_is_no_state() -> None:
    with pytest.raises(UNREADABLE):
        state_toml.load({})


def test_two_holders_of_one_port_are_no_state() -> None:
    """No verb could have written it, and the second TEI would die after loading."""
    with pytest.raises(UNREADABLE):
        state_toml.load(damaged(ports=HEALTHY["instances"][1]["ports"] * 2))
    with pytest.raises(UNREADABLE):
        state_toml.load(damaged(ports=[HEALTHY["instances"][1]["ports"][0], 20000]))


VALUES = st.recursive(
    st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@LAW
@given(st.dictionaries(st.sampled_from(sorted(HEALTHY["instances"][0])), VALUES), st.none() | VALUES)
def test_any_damage_is_seen_or_harmless(entry: dict[str, Any], instances: Any) -> None:
    """Never another exception: the reader falls back to the last good copy for those of UNREADABLE alone."""
    given = damaged(**entry) if instances is None else {**HEALTHY, "instances": instances}
    try:
        loaded = state_toml.load(given, known={})
    except UNREADABLE:
        return
    assert state_toml.load(state_toml.dump(loaded)) == loaded


def test_one_that_sleeps_is_stopped_to_an_earlier_release_and_stays_so_when_that_had_it_stopped() -> None:
    asleep = sleep.sleep(state.add(State(), spec("a"), configured(), (), NOW), "a")
    table = state_toml.dump(asleep)
    assert table["instances"][0]["wanted"] == "stopped"
    assert state_toml.load(table) == asleep
    table["instances"][0]["launch"] += 1  # it was started there, and stopped
    assert not state_toml.load(table).get("a").sleeping
    assert state_toml.load(table).get("a").wanted == "stopped"


def test_what_an_instance_was_before_is_kept_over_the_file() -> None:
    before = state.add(State(), spec("a", replicas=2), configured(), (), NOW)
    one = before.get("a")
    other = generations.replace_spec(before, "a", spec("a"), Ports(one.ports[:1], one.prometheus_ports[:1]), ())
    restarting = rolling.roll(other, "a", other.get("a").launch, {0: 4711})
    assert state_toml.load(state_toml.dump(restarting)) == restarting
    assert set(one.ports) <= set(other.taken_ports)  # an undo needs them again
    back = generations.undo(other, "a").get("a")
    assert (back.spec, back.ports, back.generation, back.launch) == (one.spec, one.ports, 3, 3)
