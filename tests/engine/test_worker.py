"""What becomes of a text whose batch fails, or whose numbers are none: it fails alone, with the reason."""

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.core.problems import Kind, Problem
from appliance.engine.answers import Answers
from appliance.engine.batching import LengthQueue
from appliance.engine.intake import Lane
from appliance.engine.metrics import EngineMetrics
from appliance.engine.model import LoadedModel
from appliance.engine.runtime import PaddedBatch
from appliance.engine.worker import InferenceWorker, TextJob, lacks_memory, lost_gpu, whole
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES

GUILTY, HUGE = 13, 99  # token ids


class Picky:
    """A runtime that cannot compute a batch with the token GUILTY, or more than one text where one is HUGE."""

    token_secs = math.inf

    def __init__(self, model: LoadedModel) -> None:
        self.batches: list[list[int]] = []
        self.batch = model.runtime.batch

    def run(self, batch: PaddedBatch, alone: bool, pooling: str | None) -> np.ndarray:
        ids = batch.input_ids
        self.batches.append(ids[:, 0].tolist())
        if GUILTY in ids:
            raise RuntimeError("token 13 is out of range")
        if HUGE in ids and len(ids) > 1:
            raise MemoryError("bad allocation")
        return ids[:, :1].astype(np.float32)


class Encoding:
    def __init__(self, token: int) -> None:
        self.ids, self.type_ids = [token], [0]

    def __len__(self) -> int:
        return 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(FAMILIES / "bert-cls", tmp_path_factory.mktemp("graphs"), threads=1)


def computed(model: LoadedModel, tokens: list[int]) -> tuple[list[TextJob], Picky, list[bool], EngineMetrics]:
    """One batch of one-token texts through a worker of its own."""
    runtime, metrics = Picky(model), EngineMetrics(64)
    results: list[Any] = []
    queue = LengthQueue(384, 32, True)
    worker = InferenceWorker(runtime, queue, metrics, results.append, threads=0, nice=0)  # type: ignore[arg-type]
    jobs = [TextJob(Encoding(token), whole) for token in tokens]
    worker.compute(jobs)
    return jobs, runtime, results, metrics


@pytest.mark.parametrize("at", range(4))
def test_one_text_that_cannot_be_computed_fails_alone(
    model: LoadedModel, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [1, 2, 3]
    tokens.insert(at, GUILTY)
    with caplog.at_level(logging.WARNING):
        jobs, runtime, results, _ = computed(model, tokens)
    for token, job in zip(tokens, jobs, strict=True):
        if token == GUILTY:
            problem = job.outcome.exception()
            assert isinstance(problem, Problem)
            assert (problem.kind, problem.code) == (Kind.PRECONDITION, "BACKEND")
            assert problem.message == "Backend error: token 13 is out of range"
        else:
            assert job.outcome.result().tolist() == [token]
            assert job.ended_at >= job.started_at > 0
    assert sorted(map(len, runtime.batches)) == [1, 1, 2, 2, 4]
    assert set(results) == {True}
    assert "now half of them at a time" in caplog.text


def test_what_is_too_large_together_is_computed_in_halves(model: LoadedModel) -> None:
    jobs, runtime, _, metrics = computed(model, [1, 2, 3, 4, 5, HUGE, HUGE, 8])
    assert [job.outcome.result().tolist() for job in jobs] == [[1], [2], [3], [4], [5], [HUGE], [HUGE], [8]]
    assert [len(batch) for batch in runtime.batches] == [8, 4, 4, 2, 1, 1, 2, 1, 1]
    assert "te_batch_running_size 0.0" in metrics.text()


def test_the_batches_after_one_without_memory_are_smaller(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    queue = LengthQueue(384, 32, True)
    worker = InferenceWorker(Picky(model), queue, EngineMetrics(64), print, threads=0, nice=0)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        worker.compute([TextJob(Encoding(token), whole) for token in (1, 2, 3, GUILTY)])
        assert queue.budget == 384, "it lacked no memory"
        worker.compute([TextJob(Encoding(token), whole) for token in (1, 2, 3, HUGE)])
    assert queue.budget == 1
    assert "There is no memory for 4 tokens: the next batches have at most 2" in caplog.text


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("bfc_arena.cc:360 Available memory of 1048576 is smaller than requested bytes of 33554432", True),
        ("Failed to allocate memory for requested buffer of size 33554432", True),
        ("std::bad_alloc: bad allocation", True),
        ("indices element out of data bounds", False),
    ],
)
def test_want_of_memory_is_told_apart(words: str, is_memory: bool) -> None:
    assert lacks_memory(RuntimeError(words)) is is_memory
    assert lacks_memory(MemoryError())


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("CUDA failure 2: out of memory ; GPU=0", False),
        ("CUDA error: out of memory", False),
        ("CUDA out of memory. Tried to allocate 28.00 MiB", False),
        ("token 13 is out of range", False),
    ],
)
def test_a_lost_gpu_is_told_apart(words: str, is_lost: bool) -> None:
    assert lost_gpu(RuntimeError(words)) is is_lost


@pytest.mark.parametrize(
    ("asked", "told"), [(["mean", "mean"], "mean"), (["mean", "cls"], None), (["mean", None], None), ([None], None)]
)
def test_hidden_states_are_pooled_elsewhere_where_all_texts_want_that(
    model: LoadedModel, asked: list[str | None], told: str | None
) -> None:
    heard: list[str | None] = []

    class Pooling(Picky):
        def run(self, batch: PaddedBatch, alone: bool, pooling: str | None) -> np.ndarray:
            heard.append(pooling)
            return super().run(batch, alone, pooling)

    queue, metrics = LengthQueue(384, 32, True), EngineMetrics(64)
    worker = InferenceWorker(Pooling(model), queue, metrics, print, threads=0, nice=0)  # type: ignore[arg-type]
    worker.compute([TextJob(Encoding(1), whole, pooling) for pooling in asked])
    assert heard == [told]


def test_a_vector_that_was_pooled_elsewhere_is_the_same(tmp_path: Path) -> None:
    answers = with_output("bert-cls", tmp_path, hidden(1))
    whole_, pooled_ = reply(answers, "embed", EMBED), []

    def run(batch: PaddedBatch, alone: bool, pooling: str | None) -> np.ndarray:
        pooled_.append(pooling)
        return np.ones((len(batch.input_ids), 32), np.float32)

    answers.model.runtime.run = run  # type: ignore[assignment,method-assign]
    parsed = [tei.EmbedResponse.FromString(raw).embeddings for raw in (whole_, reply(answers, "embed", EMBED))]
    assert parsed[0] == parsed[1]
    assert pooled_ == [answers.card.pooling] == ["cls"]


def test_a_process_whose_gpu_is_lost_ends(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Picky):
        def run(self, batch: PaddedBatch, alone: bool, pooling: str | None) -> np.ndarray:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("appliance.engine.worker.leave", sys.exit)
    queue, metrics = LengthQueue(384, 32, True), EngineMetrics(64)
    worker = InferenceWorker(Lost(model), queue, metrics, print, threads=0, nice=0)  # type: ignore[arg-type]
    job = TextJob(Encoding(1), whole)
    with pytest.raises(SystemExit) as ended:
        worker.compute([job, TextJob(Encoding(2), whole)])
    assert ended.value.code == 1
    assert "The GPU is lost to this process" in caplog.text
    assert not job.outcome.done(), "whoever asked has no answer, and asks another replica"


def test_a_model_that_computes_nothing_says_so_once_for_each_batch(model: LoadedModel) -> None:
    for tokens in ([GUILTY], [GUILTY, GUILTY]):
        jobs, runtime, results, _ = computed(model, tokens)
        assert all("out of range" in str(job.outcome.exception()) for job in jobs)
        assert results == [False]
        assert len(runtime.batches) == (1 if len(tokens) == 1 else 3)


# -- numbers that are none ------------------------------------------------------------------------------------------


def with_output(name: str, room: Path, output: Callable[[np.ndarray], np.ndarray]) -> Answers:
    """An engine whose runtime gives ``output(ids)``."""
    model = LoadedModel(FAMILIES / name, room, threads=1, pooling="splade" if name.endswith("splade") else None)
    model.runtime.run = lambda batch, alone, pooling: output(batch.input_ids)  # type: ignore[assignment,method-assign]
    return Answers(model, 32)


def hidden(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda ids: np.full((*ids.shape, 32), value, np.float32)


def flat(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda ids: np.full((len(ids), 1), value, np.float32)


def reply(answers: Answers, method: str, request: Any) -> bytes:
    lane = Lane(answers.model.permits, single=True)
    return getattr(answers, method)(request, lane).reply()


NAN, INF = float("nan"), float("inf")
EMBED, RAW = tei.EmbedRequest(inputs="a"), tei.EmbedRequest(inputs="a", normalize=False)
FINITE, ZEROS = "is not a finite number", "a vector of zeros, which cannot be normalized"
REFUSED = {
    "nan": ("bert-cls", hidden(NAN), "embed", EMBED, FINITE),
    "infinite": ("bert-cls", hidden(INF), "embed", EMBED, FINITE),
    "infinite, not normalized": ("bert-cls", hidden(-INF), "embed", RAW, FINITE),
    "zeros": ("bert-cls", hidden(0), "embed", EMBED, ZEROS),
    "of tokens": ("bert-cls", hidden(NAN), "embed_all", tei.EmbedAllRequest(inputs="a"), FINITE),
    "sparse": ("bert-splade", flat(INF), "embed_sparse", tei.EmbedSparseRequest(inputs="a"), FINITE),
    "score": ("bert-rerank", flat(NAN), "rerank", tei.RerankRequest(query="a", texts=["b"]), FINITE),
    "raw score": ("bert-rerank", flat(INF), "predict", tei.PredictRequest(inputs="a", raw_scores=True), FINITE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_are_none_are_the_texts_error(tmp_path: Path, name: str) -> None:
    folder, output, method, request, words = REFUSED[name]
    answers = with_output(folder, tmp_path, output)
    with pytest.raises(Problem) as caught:
        reply(answers, method, request)
    assert (caught.value.kind, caught.value.code) == (Kind.PRECONDITION, "BACKEND")
    assert caught.value.message.startswith("Backend error: the model gave a ")
    assert words in caught.value.message
    assert answers.model.permits.idle() or answers.model.permits.idle()  # the second: nothing came meanwhile


def test_zeros_are_an_answer_where_nothing_shall_be_normalized(tmp_path: Path) -> None:
    answers = with_output("bert-cls", tmp_path, hidden(0))
    assert list(tei.EmbedResponse.FromString(reply(answers, "embed", RAW)).embeddings) == [0.0] * 32


def test_the_other_texts_of_its_batch_have_their_vectors(tmp_path: Path) -> None:
    """One forward pass of three, of which the row of one is infinite."""

    def output(ids: np.ndarray) -> np.ndarray:
        values = np.ones((*ids.shape, 32), np.float32)
        values[1:2] = INF
        return values

    answers = with_output("bert-cls", tmp_path, hidden(1))
    pending = answers.embed(EMBED, Lane(answers.model.permits, single=True))
    (job,) = pending.jobs
    answers.model.runtime.run = lambda batch, alone, pooling: output(batch.input_ids)  # type: ignore[assignment,method-assign]
    jobs = [TextJob(job.encoding, job.reduce) for _ in range(3)]
    answers.model.workers[True].compute(jobs)
    assert [job.outcome.exception(timeout=10) is None for job in jobs] == [True, False, True]


# -- who computes -----------------------------------------------------------------------------------------------------


def test_a_lone_text_is_computed_by_whoever_brings_it_and_the_next_ones_wait_in_the_queue(model: LoadedModel) -> None:
    """Without any worker thread here: what is queued stays there."""
    runtime = Picky(model)
    queue, metrics = LengthQueue(384, 32, True), EngineMetrics(64)
    worker = InferenceWorker(runtime, queue, metrics, print, threads=0, nice=0, inline=True)  # type: ignore[arg-type]
    released = []

    def submitted(token: int) -> TextJob:
        job = TextJob(Encoding(token), whole, release=lambda: released.append(token))
        worker.submit([job])
        return job

    assert submitted(1).outcome.result(timeout=0).tolist() == [1]
    assert isinstance(submitted(GUILTY).outcome.exception(timeout=0), Problem)
    worker.busy += 1  # another text is in work
    waiting = submitted(2)
    worker.busy -= 1
    behind = submitted(3)
    assert (waiting.outcome.done(), behind.outcome.done(), len(queue)) == (False, False, 2)
    worker.compute_next()
    assert [job.outcome.result(timeout=0).tolist() for job in (waiting, behind)] == [[2], [3]]
    assert released == [1, GUILTY, 2, 3]
    assert "te_queue_size 0.0" in metrics.text()
