"""Replicas that are asked together: each that is well has answered, and of the others nothing is taken for known."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from appliance.drivers.listeners import ListenerTable, listening
from appliance.node.probe import LOOK_SECS, Heard, ServedModel, numbers
from appliance.node.probe_round import Questions, ask_together
from appliance.wire.tei.v1 import tei_pb2 as tei
from tests.node.test_probe import Classifier, Pages, connections

COUNT = 4
LISTENS, STRANGER = "one of ours", "another"


def proved(port: int, marker: str, table: ListenerTable) -> bool:
    return marker == LISTENS and bool(table.on_loopback(port))


NODE: Any = SimpleNamespace(listening=listening, listeners=SimpleNamespace(proved=proved))


class Replica(Classifier):
    """With metrics, and with what is remembered of it. refuses: with this status."""

    def __init__(self, tells_running: bool = True) -> None:
        super().__init__()
        self.pages = Pages(self.silent_port, tells_running)
        self.heard = Heard(model=ServedModel(tei.MODEL_TYPE_CLASSIFIER))
        self.refuses: grpc.StatusCode | None = None
        self.texts: list[str] = []

    def predict(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        self.texts.append(tei.PredictRequest.FromString(raw).inputs)
        if self.refuses:
            context.abort(self.refuses, "not now")
        return super().predict(raw, context)

    def questions(self, *texts: str, marker: str = LISTENS) -> Questions:
        return Questions(self.port, self.silent_port, marker, self.heard, texts)

    def stop(self) -> None:
        self.going.set()
        self.server.stop(None).wait(timeout=10)
        self.pages.server.shutdown()
        self.pages.server.server_close()
        self.pages.thread.join()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    running = [Replica() for _ in range(COUNT)]
    yield running
    for each in running:
        each.stop()


def answered(*asked: Questions) -> list[bool]:
    ask_together(NODE, asked)
    return [each.answered for each in asked]


def test_all_that_are_well_have_answered(replicas: list[Replica]) -> None:
    asked = [replicas[0].questions("x", "y"), *(each.questions() for each in replicas[1:])]
    assert answered(*asked) == [True] * COUNT
    assert [each.texts for each in replicas] == [["x", "y"], *[["a"]] * (COUNT - 1)]
    assert [list(map(numbers, each.messages)) for each in asked] == [[{"yes": 0.5}] * 2, *[[]] * (COUNT - 1)]
    assert {each.heard.unanswered for each in replicas} == {0}
    assert [connections(each.port) for each in replicas] == [0] * COUNT


def test_one_that_hangs_is_not_waited_for_and_has_our_question(replicas: list[Replica]) -> None:
    first = replicas[0]
    first.going.clear()
    assert answered(*(each.questions() for each in replicas)) == [False, *[True] * (COUNT - 1)]
    assert [each.heard.unanswered for each in replicas] == [1, *[0] * (COUNT - 1)]
    assert connections(first.port) == 0
    first.going.set()
    assert answered(first.questions()) == [True]
    assert first.heard.unanswered == 0


def test_a_text_behind_the_first_that_is_not_answered(replicas: list[Replica]) -> None:
    """The first one counts: of that nothing is in progress any more."""
    first = replicas[0]
    asked, original = first.questions("x", "y"), first.predict

    def refuses_later(raw: bytes, context: grpc.ServicerContext) -> bytes:
        reply = original(raw, context)
        first.refuses = grpc.StatusCode.FAILED_PRECONDITION
        return reply

    first.predict = refuses_later  # type: ignore[method-assign]
    assert answered(asked) == [False]
    assert (first.texts, first.heard.unanswered, asked.probed) == (["x", "y"], 0, True)


@pytest.mark.parametrize("status", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED])
def test_what_was_given_up_there_may_still_be_in_progress(replicas: list[Replica], status: grpc.StatusCode) -> None:
    replicas[0].refuses = status
    assert answered(replicas[0].questions()) == [False]
    assert replicas[0].heard.unanswered == 1


def test_who_refuses_or_is_gone_is_not_answered(replicas: list[Replica]) -> None:
    refusing, gone, well, _ = replicas
    refusing.refuses = grpc.StatusCode.RESOURCE_EXHAUSTED
    gone.server.stop(None).wait(timeout=10)
    assert answered(refusing.questions(), gone.questions(), well.questions()) == [False, False, True]
    assert (refusing.heard.unanswered, gone.heard.unanswered) == (0, 0)


def test_what_is_no_answer_of_its_model_is_none(replicas: list[Replica]) -> None:
    replicas[0].heard.model.type = tei.MODEL_TYPE_EMBEDDING  # its fields are others
    assert answered(replicas[0].questions(), replicas[1].questions()) == [False, True]
    assert replicas[0].heard.unanswered == 0


def test_a_stranger_is_asked_nothing(replicas: list[Replica]) -> None:
    stranger, well, *_ = replicas
    assert answered(stranger.questions(marker=STRANGER), well.questions()) == [False, True]
    assert (stranger.texts, stranger.pages.asked) == ([], 0)


@pytest.mark.parametrize("is_engine", [True, False], ids=["engine", "TEI"])
def test_the_work_is_looked_at_as_before_a_probe_alone(is_engine: bool) -> None:
    replica = Replica(tells_running=is_engine)
    try:
        for _ in range(3):
            assert answered(replica.questions()) == [True]
        assert replica.pages.asked == (1 if is_engine else 3)
        assert replica.heard.last
        assert replica.heard.last.answered == replica.pages.asked
        replica.heard.looked_at -= LOOK_SECS
        assert answered(replica.questions()) == [True]
        assert replica.pages.asked == (2 if is_engine else 4)
    finally:
        replica.stop()


@pytest.mark.parametrize("is_engine", [True, False], ids=["engine", "TEI"])
def test_a_tei_that_has_something_to_do_is_not_asked_here(is_engine: bool) -> None:
    """What it has in progress is inferred from what it counts, our own questions among that."""
    replica = Replica(tells_running=is_engine)
    try:
        assert answered(replica.questions()) == [True]
        replica.pages.begun.set(7)
        replica.heard.looked_at -= LOOK_SECS
        assert answered(replica.questions()) == [is_engine]
        replica.pages.ended.set(7)
        assert answered(replica.questions()) == [True]
    finally:
        replica.stop()


def test_who_does_not_tell_its_work_is_not_asked_here(replicas: list[Replica]) -> None:
    silent, well, *_ = replicas
    silent.silent_port = silent.port  # no metrics there
    assert answered(silent.questions(), well.questions()) == [False, True]
    assert silent.texts == []
