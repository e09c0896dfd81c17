"""More instances than fit take turns: nobody is refused, never more are loaded than there is room for, and none is
woken in vain: they wake up no more often than a cache of that size misses, which lets go what was used longest ago.

Callers ask popular and rare instances again and again, each with a minute of patience. With more callers than can be
served at once hardly ever two are idle: which of them gives way is proved in `tests/core/test_room.py`. At the end a
table says what a wake-up adds to the load of the model itself: `pytest -s`.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from appliance.drivers import logs
from testing.agreement import state_of
from testing.callers import Call, Callers
from testing.calling import over_grpc
from testing.room import Looks, setting_for
from testing.running import TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.processes, pytest.mark.timeout(300)]
MORE_WAKES, SPARE_WAKES = 1.1, 2  # callers meet: who came first is not always who was answered first
FIRST_LAUNCH = 2  # of an instance that runs on demand; it is created with 1, and sleeps


class Fleet(NamedTuple):
    size: int
    room: int  # so many are loaded at once
    secs: float

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.size)]

    @property
    def popularity(self) -> list[float]:
        """As of words in a text: the second is called half as often as the first, the third a third as often."""
        return [1 / (number + 1) for number in range(self.size)]


class Wake(NamedTuple):
    """evicting: another one was put to sleep for it."""

    instance: str
    launch: int
    evicting: bool


class Load(NamedTuple):
    """Of the process of a launch, until its port was open; time.monotonic."""

    began: float
    ended: float


class Waker(NamedTuple):
    """The call that woke an instance, and what it has waited beside the load: seconds."""

    wake: Wake
    load: Load
    call: Call

    @property
    def before(self) -> float:
        return self.load.began - self.call.began

    @property
    def after(self) -> float:
        return self.call.ended - self.load.ended

    @property
    def added(self) -> float:
        return self.before + self.after


def lru_misses(trace: Iterable[str], room: int) -> int:
    """Of a cache of so many that lets go what was used longest ago."""
    cached = lru_cache(maxsize=room)(len)
    for name in trace:
        cached(name)
    return cached.cache_info().misses


def wakes_in(events: Sequence[dict[str, Any]]) -> list[Wake]:
    """Of the journal, in its order."""
    wakes, counts, served = list[Wake](), Counter[str](), set[str]()
    for each in events:
        if each["event"] == "slept" and "to make room for" in each["message"]:
            served.add(each["message"].rpartition("to make room for ")[2].strip('"'))
        elif each["event"] == "woken":
            name = each["instance"]
            wakes.append(Wake(name, FIRST_LAUNCH + counts[name], name in served))
            counts[name] += 1
            served.discard(name)
    return wakes


def opened(box: RunningAppliance, name: str) -> list[float]:
    """When its engine had opened its port, each time: it says so, to a millisecond. Seconds since 1970."""
    path = Path(box.node().layout.log(state_of(box).get(name).process(0)))
    said = [json.loads(line) for line in logs.window(path, None, None).lines if '"Ready after' in line]
    return [datetime.fromisoformat(each["time"]).timestamp() for each in said]


def loads(box: RunningAppliance, began: dict[tuple[str, int], float]) -> Iterator[tuple[tuple[str, int], Load]]:
    """By instance and launch, as far as it was seen from its begin to its end."""
    since = time.time() - time.monotonic()
    for name in {name for name, _ in began}:
        times = opened(box, name)
        launches = sorted((at, launch) for (other, launch), at in began.items() if other == name)
        for (at, launch), (until, _) in pairwise([*launches, (math.inf, 0)]):
            if ready := next((each for each in times if at <= each < until), None):
                yield (name, launch), Load(at - since, ready - since)


def wakers(wakes: Iterable[Wake], known: dict[tuple[str, int], Load], calls: Sequence[Call]) -> Iterator[Waker]:
    """Of each wake-up the call that was there before the process, and came first."""
    for wake in wakes:
        if load := known.get((wake.instance, wake.launch)):
            there = [each for each in calls if each.instance == wake.instance and each.overlaps(load.began, load.began)]
            if there:
                yield Waker(wake, load, min(there, key=lambda each: each.began))


def line(what: str, secs: Sequence[float]) -> str:
    p50, p95 = np.percentile(secs, [50, 95]) * 1000 if secs else (math.nan, math.nan)
    return f"{what:38} {len(secs):6} {p50:8.0f} {p95:8.0f}"


def table(wakes: Sequence[Wake], known: dict[tuple[str, int], Load], calls: Sequence[Call]) -> None:
    """What wake-ups take, in ms, of those whose load was seen from its begin to its end, and with it their call."""
    found = list(wakers(wakes, known, calls))
    print(f"{'':38} {'number':>6} {'p50 ms':>8} {'p95 ms':>8}")
    print(line("load of the model", [each.load.ended - each.load.began for each in found]))
    print(line("added by a wake-up", [each.added for each in found]))
    print(line("  before the process", [each.before for each in found]))
    print(line("  after the port was open", [each.after for each in found]))
    print(line("added where nobody had to give way", [each.added for each in found if not each.wake.evicting]))
    print(line("added where another one gave way", [each.added for each in found if each.wake.evicting]))
    seen = sum((wake.instance, wake.launch) in known for wake in wakes)
    print(f"not seen from begin to end: {len(wakes) - seen}; without a call: {seen - len(found)}")


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(Fleet(6, 2, secs=8.0), id="six"),
        pytest.param(Fleet(20, 4, secs=600.0), id="twenty", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_instances_take_turns_as_in_a_cache(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> None:
    folder = tmp_path_factory.mktemp("turns")  # the path of a socket below it must not be too long
    settings = setting_for(folder / "measured", fleet.room)
    with RunningAppliance(folder, seeds="", settings=settings) as box:
        for name in fleet.names:
            box.create(name, start="on_demand")
        first = fleet.names[0]
        assert over_grpc(box, first) == TINY_WIDTH
        eventually(box.node().memory_needs.read)  # what it takes is estimated until then, and one alone fits
        with Looks(box.node_id(), fleet.room) as looks:
            with Callers(box, fleet.names, {TINY_WIDTH}, seed=6, weights=fleet.popularity) as callers:
                time.sleep(fleet.secs)
        calls = sorted(callers.calls, key=lambda call: call.began)
        wakes = wakes_in(box.get("/events").json())
        failed = [call for call in calls if call.failure]
        misses = lru_misses([first, *(call.instance for call in calls)], fleet.room)
        print(f"\n{len(calls)} calls, {len(failed)} failed; {looks.most} of {fleet.room} loaded at once ", end="")
        print(f"in {looks.count} looks; {len(wakes)} wake-ups, an LRU cache misses {misses} times")
        table(wakes[1:], dict(loads(box, looks.began)), calls)  # the first one was not woken by these callers
    assert failed == []
    assert looks.wrong == []
    assert 1 <= looks.most <= fleet.room
    assert len(wakes) <= MORE_WAKES * misses + SPARE_WAKES
