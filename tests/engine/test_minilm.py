"""The real MiniLM: equal to sentence-transformers, small, quick to start, its weights shared between engines."""

import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import Engine
from testing.running import MINILM
from testing.texts import mixed_texts

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("minilm"), MINILM) as running:
        yield running


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_mixed_texts_equal_sentence_transformers(engine: Engine, count: int) -> None:
    expected = np.load("tests/data/minilm.npz")["vectors"][:count].astype(np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    requests = (tei.EmbedRequest(inputs=text, truncate=True) for text in mixed_texts(1000)[:count])
    vectors = np.array([reply.embeddings for reply in engine.stub("Embed").EmbedStream(requests)], np.float32)
    assert vectors.shape == (count, 384)
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_memory_of_its_own_stays_below_200_mb_after_work(engine: Engine) -> None:
    """Without mapped files: how much of these is resident is the kernel's business, and engines share it."""
    requests = (tei.EmbedRequest(inputs=text, truncate=True) for text in mixed_texts(200, seed=5))
    assert len(list(engine.stub("Embed").EmbedStream(requests))) == 200
    memory = psutil.Process(engine.process.pid).memory_maps()
    own = sum(each.anonymous for each in memory) / 1e6
    print(f"memory of its own after 200 texts: {own:.0f} MB")
    assert own < 200


def test_a_second_engine_shares_the_mapped_weights(engine: Engine, tmp_path: Path) -> None:
    with Engine(tmp_path, MINILM) as second:
        second.stub("Embed").Embed(tei.EmbedRequest(inputs="warm"))
        maps = [
            mapping
            for mapping in psutil.Process(second.process.pid).memory_maps()
            if "model.safetensors" in mapping.path
        ]
    print(
        f"mapped weights: {sum(mapping.rss for mapping in maps) / 1e6:.0f} MB, of them private dirty: "
        f"{sum(mapping.private_dirty for mapping in maps) / 1e6:.0f} MB"
    )
    assert maps
    assert sum(mapping.private_dirty for mapping in maps) == 0


def test_cold_start_to_first_answer(tmp_path: Path) -> None:
    """The bounds of the issue with room for a busy machine: 3 s once the graph is built, 15 s the first time."""
    took = []
    for _ in range(2):
        began = time.monotonic()
        with Engine(tmp_path, MINILM) as engine:
            reply = engine.stub("Embed").Embed(tei.EmbedRequest(inputs="first"))
            took.append(time.monotonic() - began)
            assert len(reply.embeddings) == 384
    print(f"cold start: first {took[0]:.2f} s, later {took[1]:.2f} s")
    assert len(list((tmp_path / "graphs").glob("*.onnx"))) == 1


def test_arrival_order_gives_the_same_vectors(engine: Engine, tmp_path: Path) -> None:
    texts = mixed_texts(40, seed=9)
    with Engine(tmp_path, MINILM, "--arrival-order", "--max-batch-requests", "8") as plain:
        vectors = [
            [
                reply.embeddings
                for reply in one.stub("Embed").EmbedStream(
                    tei.EmbedRequest(inputs=text, truncate=True) for text in texts
                )
            ]
            for one in (engine, plain)
        ]
    np.testing.assert_allclose(np.array(vectors[0]), np.array(vectors[1]), atol=1e-5)


def test_metadata_adds_up(engine: Engine) -> None:
    times = engine.stub("Embed").Embed(tei.EmbedRequest(inputs="hello world")).metadata
    assert (times.compute_chars, times.compute_tokens) == (11, 4)
    parts = times.tokenization_time_ns + times.queue_time_ns + times.inference_time_ns
    assert 0 < times.inference_time_ns <= parts <= times.total_time_ns


def test_a_busy_port_ends_the_start_with_one_line_and_status_1(engine: Engine, tmp_path: Path) -> None:
    ended = subprocess.run(engine.command, env=engine.environ, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert str(engine.port) in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_bad_flag_ends_with_status_2(engine: Engine) -> None:
    ended = subprocess.run([*engine.command, "--pool", "x"], env=engine.environ, capture_output=True, timeout=30)
    assert ended.returncode == 2


def test_unit_length_survives_a_long_text(engine: Engine) -> None:
    reply = engine.stub("Embed").Embed(tei.EmbedRequest(inputs="word " * 5000, truncate=True))
    assert math.fsum(value * value for value in reply.embeddings) == pytest.approx(1, abs=1e-5)
    assert reply.metadata.compute_tokens == 256
