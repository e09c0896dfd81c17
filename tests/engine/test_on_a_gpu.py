"""The engine on an NVIDIA GPU with `--runtime torch`: the same vectors as on the CPU, and a batch that is too large for
it costs no text. Where there is no GPU, or the extra `torch` is not installed, nothing of it can be shown."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.engine.intake import Lane
from appliance.engine.model import LoadedModel
from appliance.engine.worker import TextJob
from testing.engines import FAMILIES

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(300),
]
MODELS = (
    *("bert-cls", "camembert-last", "deberta-v3-mean", "distilbert-mean", "gemma3-mean", "llama-last", "mistral-last"),
    *("modernbert-mean", "mpnet-mean", "qwen3-last", "roberta-mean", "xlm-roberta-mean"),
)
COPYING = {"deberta-v3-mean", "gemma3-mean", "mistral-last", "mpnet-mean"}  # in each pass: it cannot be recorded
WITHOUT_POOLING = ("bert-rerank", "modernbert-rerank", "bert-splade", "bert-classify")


def texts(count: int) -> list[str]:
    """Of very different lengths: a batch is filled up to a shape that is recorded."""
    return [" ".join(f"w{number * place % 97}" for place in range(1 + number * 7 % 90)) for number in range(count)]


def vectors(model: LoadedModel, given: list[str], pooling: str | None) -> list[np.ndarray]:
    """What the model's runtime gives for texts that many callers bring at once."""
    lane = Lane(model.permits, False)

    def submitted(text: str) -> TextJob:
        return model.submit(lane, text, lambda part, _: part.copy(), truncate=True, left=False, pooling=pooling)

    with ThreadPoolExecutor(8) as callers:
        jobs = list(callers.map(submitted, given))
    return [job.outcome.result(timeout=60) for job in jobs]


def both(name: str, room: Path) -> tuple[LoadedModel, LoadedModel]:
    on_gpu, on_cpu = (LoadedModel(FAMILIES / name, room, 2, runtime=runtime) for runtime in ("torch", "onnxruntime"))
    assert not on_gpu.runtime.on_cpu
    return on_gpu, on_cpu


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = both(name, tmp_path)
    given = texts(200)
    hidden = vectors(on_cpu, given, None)
    for pooling in ("cls", "mean", "last-token"):
        for own, rows in zip(vectors(on_gpu, given, pooling), hidden, strict=True):
            wanted = {"cls": rows[0], "mean": rows.mean(axis=0), "last-token": rows[-1]}[pooling]
            np.testing.assert_allclose(own, wanted, atol=2e-4)
    for own, rows in zip(vectors(on_gpu, given, None), hidden, strict=True):
        np.testing.assert_allclose(own, rows, atol=2e-4)
    session: Any = on_gpu.runtime.session(long=False)
    graphs = session.graphs["mean"]
    assert graphs.works if name not in COPYING else not graphs.recordings
    assert len(graphs.recordings) > 1 or name in COPYING


@pytest.mark.parametrize("name", WITHOUT_POOLING)
def test_scores_and_sparse_vectors_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = both(name, tmp_path)
    given = texts(200)
    for own, wanted in zip(vectors(on_gpu, given, None), vectors(on_cpu, given, None), strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-4)


def test_a_batch_without_memory_is_halved_and_the_next_ones_are_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=2, runtime="torch")
    given = texts(200)
    before = vectors(model, given, None)
    session: Any = model.runtime.session(long=False)
    whole, most = session.output, 600  # tokens

    def bounded(inputs: Any, pooling: str | None) -> Any:
        if inputs[0].numel() > most:  # more than any GPU has
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return whole(inputs, pooling)

    session.output = bounded
    with caplog.at_level(logging.WARNING):
        after = vectors(model, given, None)
    for own, wanted in zip(after, before, strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    assert "the next batches have at most" in caplog.text
    assert "CUDA out of memory" in caplog.text
    assert model.workers[False].queue.budget <= most
    assert model.healthy


def test_a_token_that_the_model_lacks_costs_the_gpu_nothing(tmp_path: Path) -> None:
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=2, runtime="torch")
    session: Any = model.runtime.session(long=False)
    feed = {name: np.ones((1, 8), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feed["input_ids"][0, 3] = session.words
    with pytest.raises(ValueError, match="is none of the"):
        session.run(feed, True, "cls")
    feed["input_ids"][0, 3] = session.words - 1
    assert np.isfinite(session.run(feed, True, "cls")).all()


def test_threads_that_replay_at_once_get_their_own_vectors(tmp_path: Path) -> None:
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=2, runtime="torch")
    given = texts(64)
    wanted = dict(zip(given, vectors(model, given, "mean"), strict=True))
    barrier = threading.Barrier(4)

    def again(_: int) -> None:
        barrier.wait(20)
        for text, vector in zip(given, vectors(model, given, "mean"), strict=True):
            np.testing.assert_allclose(vector, wanted[text], atol=1e-5)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(again, range(4)))
