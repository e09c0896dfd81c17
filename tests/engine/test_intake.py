"""Inputs on their way to the workers: together they are what each would be alone, and none leaves anything behind."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from appliance.core.problems import Problem
from appliance.engine.intake import JointLane, Lane
from appliance.engine.model import LoadedModel
from appliance.engine.tokens import TextInput
from appliance.engine.worker import whole as whole_vector
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, HEADS, ServedModel
from testing.running import eventually

LONG = "rain over the harbour " * 60
PLAIN = [
    *(TextInput(text, True) for text in ("rain", "a longer text", "Łódź 北京", LONG)),
    TextInput(LONG, True, left=True),
    *(TextInput(text, False) for text in ("", "rain", LONG, "word " * 20_000)),
    TextInput("rain", True, prompt_name="no such prompt"),
    TextInput(("rain", "harbour"), True),
    TextInput(("rain", LONG), True, left=True),
    TextInput(("rain", ""), True),
    TextInput(("", ""), True),
]
MODELS = {
    "bert-cls": FAMILIES / "bert-cls",
    "roberta-mean": FAMILIES / "roberta-mean",
    "static-mean": FAMILIES / "static-mean",
    "jina-v3-adapters-mean": FAMILIES / "jina-v3-adapters-mean",
    "colbert": HEADS / "colbert",
    "colbert-pylate": HEADS / "colbert-pylate",
    "qwen3-judge": HEADS / "qwen3-judge",
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(FAMILIES / "bert-cls", tmp_path_factory.mktemp("bert"), threads=1)


def shown(encoded: Any) -> Any:
    if isinstance(encoded, Problem):
        return encoded.kind, encoded.code, encoded.message
    return encoded.ids, encoded.type_ids, encoded.attention_mask, getattr(encoded, "adapter", None)


@pytest.mark.parametrize("name", MODELS)
def test_texts_that_are_encoded_together_have_the_tokens_and_the_errors_of_each_alone(
    name: str, tmp_path: Path
) -> None:
    tokens = LoadedModel(MODELS[name], tmp_path, threads=1).tokens
    given = [
        *PLAIN,
        *(TextInput(text, True, prompt_name=prompt) for text in ("rain", LONG) for prompt in tokens.prompts),
    ]
    alone = []
    for each in given:
        try:
            alone.append(shown(tokens.encode(*each)))
        except Problem as problem:
            alone.append(shown(problem))
    assert [shown(each) for each in tokens.encode_all(given)] == alone
    assert {isinstance(each[0], str) for each in alone} == {True, False}, "some are refused, and some are not"


class Panic(BaseException):
    """As pyo3's, which no `except Exception` sees: a call that ended so had no answer."""


@pytest.mark.parametrize("kind", [Exception, Panic])
def test_a_text_that_ends_the_tokenizer_costs_no_other_text_its_tokens(
    bert: LoadedModel, kind: type[BaseException]
) -> None:
    tokens, tokenizer = bert.tokens, bert.tokens.tokenizer

    class Picky:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            if text == "guilty":
                raise kind("no token for that")
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            return [self.encode(text, add_special_tokens) for text in texts]

    tokens.tokenizer = Picky()  # type: ignore[assignment]
    try:
        one, guilty, other = tokens.encode_all([TextInput(text, True) for text in ("rain", "guilty", "harbour")])
    finally:
        tokens.tokenizer = tokenizer
    assert [shown(one), shown(other)] == [shown(tokens.encode(text, True)) for text in ("rain", "harbour")]
    assert shown(guilty)[1:] == ("TOKENIZER", "tokenizer error no token for that")


def test_a_text_leaves_no_garbage_behind(bert: LoadedModel) -> None:
    """The engine collects garbage only now and then: until then all tokens of all texts would stay."""
    gc.collect()
    gc.disable()
    try:
        together = JointLane(bert.permits, gone=lambda: False)
        jobs = [bert.submit(lane, "rain", whole_vector, True, False) for lane in (Lane(bert.permits, True), together)]
        jobs += [
            bert.submit(together, "", whole_vector, True, False),
            bert.submit(together, "harbour", whole_vector, True, False),
        ]
        jobs[-1].outcome.cancel()
        together.flush()
        for job in jobs[:2]:
            job.outcome.result(timeout=20)
        eventually(lambda: bert.permits.free == bert.permits.count and not bert.workers[False].busy)
        left = [weakref.ref(each) for each in (*jobs, together)]
        del jobs, job, together
        eventually(lambda: not any(each() for each in left), timeout=5)  # the worker's thread is on its way back
    finally:
        gc.enable()


def test_each_permit_is_released_once(bert: LoadedModel) -> None:
    together = JointLane(bert.permits, gone=lambda: False)
    jobs = [bert.submit(together, text, whole_vector, True, False) for text in ("rain", "", "harbour")]
    jobs[2].outcome.cancel()
    jobs[2].outcome.cancel()
    together.flush()
    assert jobs[0].outcome.result(timeout=20) is not None
    assert "cannot be empty" in str(jobs[1].outcome.exception(timeout=20))
    with pytest.raises(CancelledError):
        jobs[2].outcome.result(timeout=20)
    eventually(lambda: bert.permits.free == bert.permits.count)


def test_a_fault_in_the_tokenizer_ends_the_call_and_keeps_no_permit(tmp_path: Path) -> None:
    """One that is not the text's. A stream waited for what never came."""
    served = ServedModel(FAMILIES / "bert-cls", tmp_path)
    try:
        model, stub = served.model, served.stub("Embed")
        request = tei.EmbedRequest(inputs="rain")
        expected = stub.Embed(request, timeout=20).embeddings
        encode, model.texts.encode = model.texts.encode, lambda given: [][0]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.EmbedStream(iter([request] * 3), timeout=20))
        assert (caught.value.code(), "IndexError" in caught.value.details()) == (grpc.StatusCode.INTERNAL, True)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Embed(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        model.texts.encode = encode
        np.testing.assert_allclose(stub.Embed(request, timeout=20).embeddings, expected, atol=1e-6)
        assert model.permits.free == model.permits.count
    finally:
        served.stop()


def test_a_rerank_of_which_one_text_is_refused_computes_none(tmp_path: Path) -> None:
    served = ServedModel(FAMILIES / "bert-rerank", tmp_path)
    try:
        computed: list[int] = []
        run = served.model.runtime.run
        served.model.runtime.run = lambda *given: computed.append(1) or run(*given)  # type: ignore[method-assign]
        request = tei.RerankRequest(query="rain", texts=["a", "b " * 600, "c"])
        with pytest.raises(grpc.RpcError) as caught:
            served.stub("Rerank").Rerank(request, timeout=20)
        assert (caught.value.code(), "must have less than" in caught.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )
        eventually(lambda: served.model.permits.free == served.model.permits.count)
        messages = [tei.RerankStreamRequest(query="rain", text=text) for text in ("b " * 600, *["a"] * 2000)]
        with pytest.raises(grpc.RpcError) as caught:
            served.stub("Rerank").RerankStream(iter(messages), timeout=20)
        assert "must have less than" in caught.value.details()
        assert not computed
        eventually(lambda: served.model.permits.free == served.model.permits.count)
    finally:
        served.stop()


@pytest.mark.parametrize("whole", [False, True])
def test_a_refusal_keeps_nothing_alive(bert: LoadedModel, whole: bool) -> None:
    """A traceback has all frames that an error went through, and what they hold: here the error itself."""

    def refuse() -> weakref.ref[Any]:
        lane = JointLane(bert.permits, gone=lambda: False, whole=True) if whole else Lane(bert.permits, True)
        try:
            bert.submit(lane, "", whole_vector, True, False)
            if isinstance(lane, JointLane):
                lane.flush()
        except Problem as problem:
            return weakref.ref(problem)
        raise AssertionError("it was not refused")

    gc.collect()
    gc.disable()
    try:
        refused = refuse()
        assert refused() is None
        assert bert.permits.free == bert.permits.count
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_panic_ends_the_stream(tmp_path: Path) -> None:
    served = ServedModel(FAMILIES / "bert-cls", tmp_path)

    def panic(given: Any) -> Any:
        raise Panic

    try:
        served.model.texts.encode = panic
        with pytest.raises(grpc.RpcError) as caught:
            list(served.stub("Embed").EmbedStream(iter([tei.EmbedRequest(inputs="rain")] * 3), timeout=20))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert served.model.permits.free == served.model.permits.count
        for thread in threading.enumerate():
            if thread.name == "stream":  # it reports its panic after the reply
                thread.join(20)
    finally:
        served.stop()
