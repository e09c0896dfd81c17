"""Replicas that are well are asked together; one that does not answer is asked alone, and keeps nobody waiting."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.monitor.golden import TEXTS
from appliance.monitor.probing import HeardOf, Outcome, Probing, ReplicaKey
from appliance.node.context import Node
from appliance.node.probe import Heard, ServedModel
from appliance.node.probe_round import Questions
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.relay import instance
from testing.running import eventually

COUNT = 6
PORTS = tuple(range(20_000, 20_000 + COUNT))
INSTANCE = replace(instance("a", 20_000, "org/a"), ports=PORTS, prometheus_ports=PORTS)
ANSWERED, WRONG = (ProbeResult.ANSWERED, ""), (ProbeResult.WRONG, "it strays")


class Replicas(Probing):
    """Probing, where each probe alone waits until it is told to end, as does the note of a fingerprint. silent: do not
    answer in a round. unknown: their fingerprints."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        node: Any = SimpleNamespace(marker=lambda instance, replica: str(replica))
        golden = SimpleNamespace(judge=lambda instance, port, messages: WRONG)
        guard = SimpleNamespace(
            noting=lambda instance, replica, pid, began_ms, compare: compare(),
            awaits_fingerprint=lambda instance, replica, pid: replica in self.unknown,
            note_fingerprint=lambda instance, replica, pid: self.note(replica),
        )
        super().__init__(node, golden, guard, pool)  # type: ignore[arg-type]
        self.ends = [threading.Event() for _ in range(COUNT)]
        self.silent: set[str] = set()
        self.rounds_of: list[list[str]] = []
        self.unknown: set[int] = set()
        self.noted: list[int] = []
        self.alone: list[int] = []
        self.told: list[int] = []

    def ask_together(self, _: Node, asked: Sequence[Questions]) -> None:
        self.rounds_of.append([each.marker for each in asked])
        for each in asked:
            each.answered = each.marker not in self.silent

    def note(self, replica: int) -> None:
        self.ends[replica].wait(30)
        self.noted.append(replica)

    def ask(self, instance: Instance, replica: int, deadline_secs: float, golden: bool, of: HeardOf) -> Outcome:
        self.alone.append(replica)
        self.ends[replica].wait(30)
        return Outcome(*ANSWERED, golden, 0.0)

    def begin_one(self, replica: int, calm: bool = True, golden: bool = False) -> None:
        def hear(number: int, ended: Future[Outcome]) -> None:
            assert ended.result()
            self.told.append(number)

        self.begin(INSTANCE, replica, 1, 5.0, golden, partial(hear, replica), calm)

    def begin_all(self, *numbers: int) -> None:
        for number in numbers:
            self.begin_one(number)
        self.begin_round()

    def outcome(self, replica: int) -> Outcome | None:
        return self.take(ReplicaKey("a", replica), 1)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    with ThreadPoolExecutor(16) as pool:
        probing = Replicas(pool)
        for number in range(COUNT):
            heard = Heard(model=ServedModel(tei.MODEL_TYPE_EMBEDDING))
            probing.heard[ReplicaKey("a", number)] = HeardOf(1, heard)
        monkeypatch.setattr("appliance.monitor.probing.ask_together", probing.ask_together)
        yield probing
        for end in probing.ends:
            end.set()
        probing.rounds.shutdown()


def test_those_of_a_look_are_asked_in_one_round(replicas: Replicas) -> None:
    replicas.begin_all(*range(COUNT))
    eventually(lambda: replicas.told == list(range(COUNT)))
    assert replicas.rounds_of == [list(map(str, range(COUNT)))]
    assert (replicas.noted, replicas.alone) == ([], [])
    outcomes = [replicas.outcome(number) for number in range(COUNT)]
    assert {each and (each.result, each.compared) for each in outcomes} == {(ProbeResult.ANSWERED, False)}
    replicas.begin_round()
    assert len(replicas.rounds_of) == 1, "nobody was left to ask"


def test_who_does_not_answer_is_asked_alone_and_keeps_nobody_waiting(replicas: Replicas) -> None:
    replicas.silent = {"0", "1"}
    replicas.begin_all(0, 1, 2)
    eventually(lambda: sorted(replicas.alone) == [0, 1] and replicas.told == [2])
    replicas.begin_all(3, 4)
    eventually(lambda: replicas.told == [2, 3, 4])
    assert replicas.is_running(ReplicaKey("a", 0))
    assert not replicas.has_ended(ReplicaKey("a", 0))
    replicas.ends[0].set()
    eventually(lambda: replicas.told == [2, 3, 4, 0])
    assert replicas.outcome(0) == Outcome(*ANSWERED, False, 0.0), "and is heard of once"


def test_golden_answers_are_compared_in_the_round(replicas: Replicas) -> None:
    replicas.silent = {"1"}
    replicas.begin_one(0, golden=True)
    replicas.begin_one(1, golden=True)
    assert [each.questions.texts for each in replicas.next_round] == [TEXTS, TEXTS]
    replicas.begin_round()
    eventually(lambda: replicas.told == [0])
    outcome = replicas.outcome(0)
    assert outcome
    assert (outcome.result, outcome.detail, outcome.compared) == (*WRONG, True)
    replicas.ends[1].set()
    eventually(lambda: replicas.told == [0, 1])
    assert replicas.outcome(1) == Outcome(*ANSWERED, True, 0.0), "compared alone, too"


def test_what_follows_from_an_answer_keeps_no_other_round_waiting(replicas: Replicas) -> None:
    replicas.unknown = {0}
    replicas.begin_all(0, 1)
    replicas.begin_all(2)
    eventually(lambda: replicas.told == [1, 2])
    replicas.ends[0].set()
    eventually(lambda: replicas.told == [1, 2, 0])
    assert replicas.noted == [0]


@pytest.mark.parametrize("known", [True, False], ids=["not well", "of an unknown type"])
def test_what_is_not_well_or_new_waits_for_no_round(replicas: Replicas, known: bool) -> None:
    if not known:
        replicas.heard[ReplicaKey("a", 1)] = HeardOf(1, Heard())
    replicas.begin_one(0)
    replicas.begin_one(1, calm=not known)
    eventually(lambda: replicas.alone == [1])
    assert not replicas.rounds_of


def test_a_round_that_fails_leaves_all_to_be_asked_alone(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(node: Node, asked: Sequence[Questions]) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("appliance.monitor.probing.ask_together", fail)
    replicas.begin_all(0, 1)
    eventually(lambda: sorted(replicas.alone) == [0, 1])
    for end in replicas.ends:
        end.set()
    eventually(lambda: sorted(replicas.told) == [0, 1])
    eventually(lambda: "a mistake of ours" in caplog.text)


def test_where_no_thread_can_be_started_nobody_is_left_for_ever(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        replicas.begin_one(0, calm=False)
        replicas.begin_all(1, 2)
        outcomes = [replicas.outcome(number) for number in range(3)]
    assert [each and each.result for each in outcomes] == [ProbeResult.BUSY] * 3
    replicas.begin_all(3)
    eventually(lambda: 3 in replicas.told)
    replicas.silent = {"4"}
    replicas.ends[4].set()
    with monkeypatch.context() as patched:
        patched.setattr(replicas.pool, "submit", lambda work: no_thread(threading.current_thread()))
        replicas.begin_all(4, 5)
        eventually(lambda: replicas.has_ended(ReplicaKey("a", 4)))
    eventually(lambda: 5 in replicas.told)
    outcome = replicas.outcome(4)
    assert outcome
    assert outcome.result is ProbeResult.BUSY
