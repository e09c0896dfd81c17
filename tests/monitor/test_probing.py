"""Probes of replicas that are well come one after the other; one that hangs keeps none of them waiting."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.drivers.listeners import Listeners
from appliance.monitor.probing import HELD_UP_SECS, Outcome, Probing, ReplicaKey
from testing.relay import instance
from testing.running import eventually

COUNT = 6


class Replicas(Probing):
    """Probing, where each probe waits until it is told to end."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        node: Any = SimpleNamespace(listeners=Listeners("NO_SUCH_MARKER"))
        super().__init__(node, SimpleNamespace(), SimpleNamespace(), pool)  # type: ignore[arg-type]
        self.ends = [threading.Event() for _ in range(COUNT)]
        self.running: set[int] = set()
        self.most = 0
        self.heard: list[int] = []  # type: ignore[assignment]

    def heard_of(self, key: ReplicaKey, pid: int | None, instance: Instance) -> Any:
        return None

    def ask(self, instance: Instance, replica: int, deadline_secs: float, golden: bool, of: Any) -> Outcome:
        self.running.add(replica)
        self.most = max(self.most, len(self.running))
        self.ends[replica].wait(30)
        self.running.discard(replica)
        return Outcome(ProbeResult.ANSWERED, "", golden, 0.0)

    def begin_one(self, replica: int, in_turn: bool = True) -> None:
        def hear(number: int, ended: Future[Outcome]) -> None:
            assert ended.result().result is ProbeResult.ANSWERED
            self.heard.append(number)

        self.begin(INSTANCE, replica, 1, 5.0, False, partial(hear, replica), in_turn)


INSTANCE = instance("a", 20_000, "org/a")


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    with ThreadPoolExecutor(16) as pool:
        probing = Replicas(pool)
        yield probing
        for end in probing.ends:
            end.set()
        probing.turns.shutdown()


def test_one_at_a_time_in_the_order_of_their_beginning(replicas: Replicas) -> None:
    for end in replicas.ends:
        end.set()
    for number in range(COUNT):
        replicas.begin_one(number)
    eventually(lambda: len(replicas.heard) == COUNT)
    assert replicas.heard == list(range(COUNT))
    assert replicas.most == 1


def test_one_that_hangs_keeps_no_other_waiting(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(COUNT - 2):
        replicas.begin_one(number)
    eventually(lambda: replicas.running == {0})
    replicas.hurry()
    assert replicas.running == {0}, "it is not late yet"
    monkeypatch.setattr("appliance.monitor.probing.HELD_UP_SECS", -HELD_UP_SECS)
    replicas.hurry()
    eventually(lambda: replicas.running == set(range(COUNT - 2)))
    replicas.begin_one(COUNT - 2)
    eventually(lambda: COUNT - 2 in replicas.running)
    assert replicas.heard == [], "what was begun anew is heard of once, when it ends"
    for end in replicas.ends:
        end.set()
    eventually(lambda: sorted(replicas.heard) == list(range(COUNT - 1)))
    assert all(replicas.take(ReplicaKey("a", number), 1) for number in range(COUNT - 1))
    monkeypatch.undo()
    replicas.begin_one(COUNT - 1)
    eventually(lambda: COUNT - 1 in replicas.heard)
    assert replicas.probes[ReplicaKey("a", COUNT - 1)].in_turn, "and then in turn again"


def test_what_is_not_well_waits_for_nobody(replicas: Replicas) -> None:
    replicas.begin_one(0)
    replicas.begin_one(1, in_turn=False)
    eventually(lambda: replicas.running == {0, 1})
    assert not replicas.has_ended(ReplicaKey("a", 1))
