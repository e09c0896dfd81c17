"""What counts as the same answer: vectors by cosine and norm, scores also by how far they moved."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.health import ProbeResult
from appliance.core.state import Instance
from appliance.monitor.golden import MOST_RIGHT, TEXTS, Golden, least_cosine, norm, strayed
from appliance.node.probe import Answer, ProbeTarget
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.running import free_ports
from testing.specs import instance, spec

NAN = float("nan")


def one(score: float) -> Answer:
    return {"LABEL_0": score}


def vector(*values: float) -> Answer:
    return {str(at): value for at, value in enumerate(values)}


UNIT = [math.cos(at) for at in range(64)]
RIGHT: dict[str, tuple[Answer, Answer, float]] = {  # now, then, the largest norm of all golden answers
    "a score next to zero": (one(0.0015), one(0.001), 0.002),
    "on the other side of zero": (one(-0.0005), one(0.0005), 5.0),
    "exactly zero": (one(0.0), one(0.0), 0.0),
    "zero that moved": (one(0.001), one(0.0), 0.0),
    "a large score": (one(-10.92), one(-11.0), 11.0),
    "a small score of a model with large ones": (one(0.15), one(0.1), 11.0),
    "small scores of several labels": ({"no": 0.004, "yes": -0.001}, {"no": 0.001, "yes": 0.002}, 0.01),
    "a vector": (vector(*(value * 1.005 for value in UNIT)), vector(*UNIT), 5.7),
    "no vector at all": ({}, {}, 0.0),
    "a text without a known word": (vector(0.0, 0.0), vector(0.0, 0.0), 0.0),
}
STRAYED: dict[str, tuple[Answer, Answer, float]] = {
    "a score next to zero": (one(0.02), one(0.001), 0.002),
    "a large score": (one(-10.8), one(-11.0), 11.0),
    "a score that became zero": (one(0.0), one(1.58), 1.58),
    "another sign": (one(-1.58), one(1.58), 1.58),
    "labels that changed places": ({"no": 1.0, "yes": 2.0}, {"no": 2.0, "yes": 1.0}, 2.3),
    "other labels": ({"maybe": 2.0}, {"yes": 2.0}, 2.0),
    "a score that is not a number": (one(NAN), one(0.001), 0.002),
    "an infinite score": (one(math.inf), one(0.001), 0.002),
    "a vector of zeros": (vector(0.0, 0.0), vector(0.3, 0.4), 0.5),
    "a vector that was one of zeros": (vector(0.3, 0.4), vector(0.0, 0.0), 0.0),
    "a small vector turned round": (vector(-0.001, 0.0), vector(0.001, 0.0), 0.001),  # it is no score
    "a small vector beside large ones": (vector(0.0, 0.01), vector(0.01, 0.0), 30.0),
    "a vector with a value that is not a number": (vector(NAN, 1.0), vector(1.0, 1.0), 1.4),
    "one that became empty": ({}, {"17": 0.5}, 0.5),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_answer(name: str) -> None:
    assert strayed(*RIGHT[name]) == ""


@pytest.mark.parametrize("name", STRAYED)
def test_another_answer(name: str) -> None:
    why = strayed(*STRAYED[name])
    assert "cosine" in why
    assert "times its norm" in why


def test_what_is_wrong_with_a_score_names_the_distance() -> None:
    assert strayed(one(0.5), one(0.25), 2.0).endswith("and is 0.2500 away from it (at most 0.0200)")


SCORES = st.dictionaries(st.sampled_from(["no", "yes", "maybe"]), st.floats(-50, 50), min_size=1)


@given(SCORES, st.floats(-0.005, 0.005))
def test_noise_of_half_a_hundredth_never_strays(then: Any, noise: float) -> None:
    assert strayed({name: value + noise for name, value in then.items()}, then, norm(then)) == ""


class Reranker(grpc.GenericRpcHandler):
    """Every text has the score that it is told, or fails."""

    def __init__(self) -> None:
        self.score, self.failure = 0.0, ""
        ports = free_ports(2)
        self.replica = ProbeTarget(ports[0], ports[1], proved=lambda port: True)
        self.server = grpc.server(ThreadPoolExecutor(2), handlers=[self])
        self.server.add_insecure_port(f"127.0.0.1:{ports[0]}")
        self.server.start()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.info if call.method.endswith("Info") else self.predict)

    def info(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        return tei.InfoResponse(model_type=tei.MODEL_TYPE_RERANKER).SerializeToString()

    def predict(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        if self.failure:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.failure)
        found = tei.Prediction(score=self.score, label="LABEL_0")
        return tei.PredictResponse(predictions=[found]).SerializeToString()


@pytest.fixture
def reranker() -> Iterator[Reranker]:
    found = Reranker()
    yield found
    found.server.stop(None).wait(timeout=10)


def test_a_reranker_next_to_zero_stays_and_one_that_fails_is_no_golden_answer(
    reranker: Reranker, tmp_path: Path
) -> None:
    golden, one = Golden(tmp_path / "golden", lambda instance: {}), instance(spec("a"))
    reranker.failure = "Backend error: out of memory"
    assert golden.check(one, reranker.replica) == (ProbeResult.BUSY, "")  # nothing was learned yet
    reranker.failure = ""
    outcomes = []
    for reranker.score in (0.001, 0.0015, -0.0005, 0.02):
        outcomes.append(golden.check(one, reranker.replica)[0])
    assert outcomes == [ProbeResult.ANSWERED, ProbeResult.ANSWERED, ProbeResult.ANSWERED, ProbeResult.WRONG]
    reranker.failure = "Backend error: the model gave a score that is not a finite number"
    outcome, why = golden.check(one, reranker.replica)
    assert outcome is ProbeResult.MISSED
    assert why == f"it does not answer a golden text any more: {reranker.failure}"


def test_what_is_no_number_is_never_a_golden_answer(tmp_path: Path) -> None:
    """Each sound answer would differ from it, until somebody deletes the instance."""
    golden, one = Golden(tmp_path / "golden", lambda instance: {}), instance(spec("a"))
    broken, sound = ([tei.EmbedResponse(embeddings=[first, 1.0])] * len(TEXTS) for first in (NAN, 2.0))
    assert golden.judge(one, 1, broken)[0] is ProbeResult.WRONG
    assert golden.judge(one, 1, sound)[0] is ProbeResult.ANSWERED
    assert golden.judge(one, 1, broken)[0] is ProbeResult.WRONG
    kept = golden.path(one)
    kept.write_text(kept.read_text().replace("2.0", "NaN"))  # as it was kept before
    assert golden.judge(one, 1, sound)[0] is ProbeResult.ANSWERED


def test_the_cosine_is_the_least_of_all_texts_and_says_nothing_of_scores() -> None:
    kept = [vector(1.0, 0.0), vector(0.0, 2.0)]
    assert least_cosine(kept, kept) == 1.0
    assert least_cosine([vector(1.0, 0.0), vector(3.0, 4.0)], kept) == pytest.approx(0.8)
    assert least_cosine([vector(NAN, 0.0), vector(0.0, 2.0)], kept) == 0.0
    assert math.isnan(least_cosine([one(0.5)], [one(0.5)])), "the cosine of one number is its sign"


def test_the_distance_is_that_of_the_replicas_there_are(tmp_path: Path) -> None:
    golden, two = Golden(tmp_path, lambda instance: {}), replace(instance(spec("a", replicas=2)), ports=(1, 2))
    assert math.isnan(golden.distance(two))
    golden.cosines["a"] = {1: 1.0, 2: 0.75, 3: 0.0}
    assert golden.distance(two) == 0.25, "a port of before counts no more"
    golden.cosines["a"] = {1: 1.0000000002}
    assert golden.distance(two) == 0.0
    golden.cosines["a"] = {1: NAN}
    assert math.isnan(golden.distance(two))


def test_what_was_right_is_right_again_for_the_same_file_and_the_same_instance(
    reranker: Reranker, tmp_path: Path
) -> None:
    golden, one = Golden(tmp_path / "golden", lambda instance: {}), instance(spec("a"))

    def outcome(score: float, of: Instance = one) -> ProbeResult:
        reranker.score = score
        return golden.check(of, reranker.replica)[0]

    file = tmp_path / "golden" / "a.json"
    assert [outcome(score) for score in (0.5, 0.5, 0.505, 0.6, 0.5)] == [
        *(ProbeResult.ANSWERED, ProbeResult.ANSWERED, ProbeResult.ANSWERED, ProbeResult.WRONG, ProbeResult.ANSWERED)
    ]
    assert len(golden.right["a"].contents) == 2
    file.write_text(file.read_text().replace("0.5", "0.75"))
    assert outcome(0.5) is ProbeResult.WRONG, "the file is another one"
    assert outcome(0.75) is ProbeResult.ANSWERED
    file.unlink()
    assert outcome(0.25) is ProbeResult.ANSWERED, "the first answer decides again"
    assert outcome(0.75) is ProbeResult.WRONG
    assert outcome(0.25) is ProbeResult.ANSWERED
    later = replace(one, created_at="2030-01-01T00:00:00.000Z")
    assert outcome(0.75, later) is ProbeResult.ANSWERED, "the instance is another one"
    for number in range(3 * MOST_RIGHT):
        assert outcome(0.75 + number * 0.0001, later) is ProbeResult.ANSWERED
    assert len(golden.right["a"].contents) <= MOST_RIGHT
    golden.forget_others(set())
    assert not golden.right
