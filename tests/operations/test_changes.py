"""Changes of the state and of the registry of models: the same values give the same result, and nothing is asked."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from appliance.core import models, repairs, state, state_toml
from appliance.core import models as registry
from appliance.core.models import Model, Models
from appliance.core.placement import Device, Occupancy
from appliance.core.problems import Problem
from appliance.core.state import State
from appliance.core.status import Liveness, Process, Sighting
from appliance.operations.instances import add_placed, emptied, started, stopped
from appliance.operations.models import begun, removed
from testing.specs import configured, spec

NOW = "2026-01-01T00:00:00.000Z"
DEFAULTS = configured()
GIB = 1024**3
DEVICES = tuple(Device(index, f"GPU-{index}", "H200", 80 * GIB, 0, 80 * GIB, 0.0, 40) for index in range(2))
NOTHING_SEEN = Sighting(0, ())


class Audit:
    """What Python's audit hooks tell of files, sockets and processes while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self.hear)  # for the life of this process: hooks cannot be taken away

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event.partition(".")[0] in ("open", "socket", "os", "subprocess", "fcntl", "ctypes"):
            self.events.append(event)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False
        assert self.events == []


AUDIT = Audit()


def grown() -> State:
    current = state.add(State(), spec("a", replicas=2, gpu_ids="auto"), DEFAULTS, (), NOW, (0, 0))
    current = state.add(current, spec("b"), DEFAULTS, (), NOW)
    current = repairs.quarantine(current, "a", 1, 1, "why")
    return state.stop(current, "b")


def added(add: Callable[..., State], name: str = "c", **fields: Any) -> Callable[[State], State]:
    occupancy = Occupancy(DEVICES, {})
    wanted = spec(name, gpu_ids="auto", **fields)
    return partial(add_placed, add=add, spec=wanted, settings=DEFAULTS, busy={8082}, now=NOW, occupancy=occupancy)


CHANGES: dict[str, Callable[[State], State]] = {
    "add": added(state.add),
    "seed": added(state.seed, replicas=3),
    "empty": emptied,
    "start": partial(started, name="b", sighting=NOTHING_SEEN, settings=DEFAULTS),
    "lift": partial(started, name="a", sighting=NOTHING_SEEN, settings=DEFAULTS),
    "stop": partial(stopped, name="a"),
    "restart": partial(state.restart, name="a"),
    "remove": partial(state.remove, name="a"),
    "move": partial(state.move, name="a", settings=DEFAULTS, taken={8080}, busy={8090}),
    "eject": partial(repairs.eject, name="a", replica=0, launch=1, reason="why"),
    "readmit": partial(repairs.readmit, name="a", replica=0, launch=1),
    "quarantine": partial(repairs.quarantine, name="a", replica=0, launch=1, reason="why"),
    "count": partial(repairs.count_restart, name="a", launch=1),
    "forget": partial(state.forget, created=grown().get("a")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_state_is_a_function_of_values(name: str) -> None:
    before, picture = grown(), state_toml.dump(grown())
    with AUDIT.quiet():
        first, second = CHANGES[name](before), CHANGES[name](before)
    assert first == second
    assert (first == before) == (name == "readmit")  # no replica was ejected
    assert state_toml.dump(before) == picture


def registered() -> Models:
    known = registry.add(Models(), Model("org/a"), NOW)
    return registry.begin(registry.add(known, Model("org/b"), NOW), "org/b", "download", NOW)


MODEL_CHANGES: dict[str, Callable[[Models], Models]] = {
    "add": partial(models.add, model=Model("org/c"), now=NOW),
    "remove": partial(removed, model_id="org/a"),
    "remove what only the cache has": partial(removed, model_id="org/c"),
    "begin": partial(begun, model=Model("org/a"), kind="load", now=NOW, fields="{}"),
    "begin with what only the cache has": partial(begun, model=Model("org/c"), kind="download", now=NOW, fields=""),
    "end": partial(models.end, number=1, download_error="no"),
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_change_of_the_registry_is_a_function_of_values(name: str) -> None:
    before, picture = registered(), models.dump(registered())
    with AUDIT.quiet():
        first, second = MODEL_CHANGES[name](before), MODEL_CHANGES[name](before)
    assert first == second
    assert (first == before) == (name == "remove what only the cache has")
    assert models.dump(before) == picture


def test_the_audit_hears_what_a_change_must_not_do() -> None:
    with pytest.raises(AssertionError), AUDIT.quiet():
        open(__file__).close()
    AUDIT.events.clear()


# -- facts that went stale before the change ---------------------------------------------------------------------------


def test_a_replica_that_came_meanwhile_is_on_its_way() -> None:
    """Else two instances that are created at once would share the emptier GPU."""
    change = added(state.add)
    assert change(State()).get("c").placed == (0,)
    assert change(state.add(State(), spec("d", gpu_ids="auto"), DEFAULTS, (), NOW, (0,))).get("c").placed == (1,)


def test_a_port_that_was_given_meanwhile_is_taken() -> None:
    first = added(state.add)(State())
    second = added(state.add, "d")(first)
    assert not {*first.get("c").ports} & {*second.get("d").ports}


def running(launch: int) -> Sighting:
    return Sighting(launch, (Liveness(Process("a", "a-0", "RUNNING", pid=1, age=1.0), True),))


def failed(launch: int) -> Sighting:
    return Sighting(launch, (Liveness(Process("a", "a-0", "FATAL")),))


def test_what_was_seen_of_an_earlier_launch_starts_nothing_twice() -> None:
    one = state.add(State(), spec("a"), DEFAULTS, (), NOW)
    again = started(one, "a", failed(1), DEFAULTS)
    assert again.get("a").launch == 2
    with pytest.raises(Problem, match='"a" is starting: use restart') as caught:
        started(again, "a", failed(1), DEFAULTS)
    assert caught.value.code == "ALREADY_RUNNING"


def test_what_runs_is_not_started_unless_it_was_stopped_meanwhile() -> None:
    one = state.add(State(), spec("a"), DEFAULTS, (), NOW)
    with pytest.raises(Problem, match='"a" is running: use restart'):
        started(one, "a", running(1), DEFAULTS)
    assert started(state.stop(one, "a"), "a", running(1), DEFAULTS).get("a").wanted == "running"


def test_a_start_lifts_only_where_others_are_sound() -> None:
    lifted = started(grown(), "a", NOTHING_SEEN, DEFAULTS).get("a")
    assert (lifted.launch, lifted.quarantined) == (1, {})
    assert state.liftable(grown().get("a")) == (1,)
    both = repairs.quarantine(grown(), "a", 0, 1, "why")
    assert state.liftable(both.get("a")) == ()
    assert started(both, "a", NOTHING_SEEN, DEFAULTS).get("a").launch == 2
