"""Calls that come before a replica is ready: for whom they wait, and what they are told."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.core import routing
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Route, Table, Target
from appliance.core.settings import QueueSettings
from appliance.multiplexer.arrivals import Arrivals, Limits

MODEL = Target(model_id="org/m")
AWAKE = Route("a", "org/m", "running", (Replica("a", 0, "127.0.0.1:1", "org/m", 1, 8),))
ASLEEP = Route("b", "org/m", "stopped", (Replica("b", 0, "127.0.0.1:2", "org/m", 1, 8),), sleeping=True)
FAILED = replace(AWAKE, replicas=(), ejected=AWAKE.replicas)


class World:
    """What arrivals ask. starting: the seconds that are left, by instance; who is not there is not on its way."""

    def __init__(self, *routes: Route, starting: dict[str, float | None] | None = None, **settings: Any) -> None:
        self.table = Table(routes)
        self.starting = starting or {}
        self.woken: list[str] = []
        self.obstacle: Problem | None = None
        self.refused: dict[str, Problem] = {}  # for good
        self.lately = False
        self.arrivals = Arrivals(
            QueueSettings(**settings),
            lambda: self.table,
            lambda replicas, since: self.lately,
            lambda name: self.starting[name],
            self.wake,
        )

    def wake(self, name: str) -> Problem | None:
        self.woken.append(name)
        if problem := self.refused.get(name):
            raise problem
        return self.obstacle


def choosing(*outcomes: Any) -> Callable[[bool], Any]:
    """Refuses as often as None comes."""
    left = iter(outcomes)

    def choose(look: bool) -> Any:
        if (outcome := next(left)) is None:
            raise routing.none_of(["a"])
        return outcome

    return choose


def within(secs: float) -> Callable[[], Limits]:
    return lambda: Limits(time.monotonic() + secs, lambda: True)


def refusal(world: World, secs: float = 20.0, target: Target = MODEL) -> Problem:
    with pytest.raises(Problem) as refused:
        world.arrivals.until_ready(target, choosing(*[None] * 1000), within(secs))
    return refused.value


def test_who_finds_a_replica_waits_for_nobody() -> None:
    world = World(AWAKE)
    assert world.arrivals.until_ready(MODEL, choosing("it"), within(0)) == "it"
    assert not world.arrivals.wanted()


def test_one_that_starts_is_waited_for() -> None:
    world = World(AWAKE, starting={"a": None})
    assert world.arrivals.until_ready(MODEL, choosing(None, None, "it"), within(20)) == "it"


def test_one_that_is_away_for_a_moment_is_waited_for_in_any_case() -> None:
    for waits in (True, False):
        world = World(AWAKE, starting={"a": None}, wait_for_start=waits)
        world.lately = True
        assert world.arrivals.until_ready(MODEL, choosing(None, "it"), within(20)) == "it"


def test_one_that_is_not_on_its_way_is_refused_at_once() -> None:
    began = time.monotonic()
    assert refusal(World(AWAKE)).kind is Kind.UNAVAILABLE
    assert time.monotonic() - began < 5


def test_the_news_of_a_replica_ends_the_wait_at_once() -> None:
    world = World(AWAKE, starting={"a": None})
    chosen: list[Any] = []
    ready = threading.Event()

    def choose(look: bool) -> Any:
        if not ready.is_set():
            raise routing.none_of(["a"])
        return "it"

    waiter = threading.Thread(target=lambda: chosen.append(world.arrivals.until_ready(MODEL, choose, within(60))))
    waiter.start()
    while "a" not in world.arrivals.wanted():
        time.sleep(0.01)
    ready.set()
    world.arrivals.notify()
    waiter.join(20)
    assert chosen == ["it"]
    assert not world.arrivals.wanted()


def test_a_load_that_takes_far_too_long_is_not_waited_for() -> None:
    problem = refusal(World(AWAKE, starting={"a": 60.0}), secs=20)
    assert problem.retry_after_ms == 60_000
    assert "it answers in 60.0 s" in problem.message
    assert refusal(World(AWAKE, starting={"a": 60.0}, wait_for_start=False)).retry_after_ms is None


def test_one_that_sleeps_is_woken_where_no_other_is_on_its_way() -> None:
    for other, woken in ((FAILED, True), (replace(AWAKE, lacks_model=True, replicas=()), True), (AWAKE, False)):
        world = World(other, ASLEEP, starting={"a": None, "b": None})
        assert world.arrivals.until_ready(MODEL, choosing(None, None, "it"), within(20)) == "it"
        assert bool(world.woken) is woken


def test_it_is_woken_also_where_nobody_waits() -> None:
    world = World(ASLEEP, starting={"b": None}, wait_for_start=False)
    refusal(world)
    assert world.woken == ["b"]


OTHER = replace(ASLEEP, name="c", replicas=(replace(ASLEEP.replicas[0], instance="c"),))


def test_where_the_first_of_two_that_sleep_cannot_wake_the_other_does() -> None:
    world = World(ASLEEP, OTHER, starting={"b": None, "c": None})
    world.refused["b"] = Problem(Kind.UNAVAILABLE, "INSUFFICIENT_MEMORY", "it never fits")
    assert world.arrivals.until_ready(MODEL, choosing(None, None, "it"), within(20)) == "it"
    assert "c" in world.woken
    world.refused["c"] = Problem(Kind.UNAVAILABLE, "INSUFFICIENT_MEMORY", "nor does this")
    assert refusal(world).message == "it never fits"


def test_who_waits_for_room_is_told_so() -> None:
    world = World(ASLEEP, starting={"b": 2.0})
    world.obstacle = Problem(Kind.UNAVAILABLE, "NO_ROOM", "there is none")
    problem = refusal(world, secs=0.3)
    assert (problem.code, problem.message, problem.retry_after_ms) == ("NO_ROOM", "there is none", 1000)


def test_no_more_wait_than_a_queue_has_places() -> None:
    world = World(AWAKE, starting={"a": 3.0}, max_size=1)
    with world.arrivals.place(MODEL), pytest.raises(Problem) as refused, world.arrivals.place(MODEL):
        pass
    assert (refused.value.code, refused.value.retry_after_ms) == ("QUEUE_FULL", 3000)
    assert not world.arrivals.wanted()


def test_a_batch_is_in_use_between_its_slices() -> None:
    world = World(AWAKE)
    with world.arrivals.using(MODEL):
        assert world.arrivals.wanted() == {"a"}
    assert not world.arrivals.wanted()
