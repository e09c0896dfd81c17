"""The graph that is kept is a copy: whatever happened to it, the model starts, and the next start finds it whole."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from appliance.drivers.modelfolder import read_card
from appliance.engine.runtime import PaddedBatch, Runtime
from testing.engines import FAMILIES

ROW = np.arange(1, 9, dtype=np.int64)[None]


def loaded(room: Path) -> np.ndarray:
    runtime = Runtime(read_card(FAMILIES / "bert-cls", None), room, 1, "onnxruntime", None)
    return runtime.run(PaddedBatch(ROW, np.ones_like(ROW), np.zeros_like(ROW), ROW[:, 0]))


def bent(raw: bytes) -> bytes:
    """Another epsilon: it loads, and computes something else."""
    at = raw.index(b"epsilon")
    return raw[: at + 10] + b"\x41" + raw[at + 11 :]


DAMAGE = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "garbage": lambda raw: b"\xff\x00garbage" * 999,
    "zeros": lambda raw: bytes(len(raw)),
    "bent": bent,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_graph_is_built_anew_and_replaced(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = loaded(tmp_path)
    (graph,) = tmp_path.iterdir()
    raw = graph.read_bytes()
    graph.write_bytes(DAMAGE[name](raw))
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(loaded(tmp_path), right)
    assert str(graph) in caplog.text
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [raw]
    caplog.clear()
    loaded(tmp_path)
    assert not caplog.text


def test_a_graph_that_cannot_be_kept_or_read_is_built_at_each_start(tmp_path: Path) -> None:
    right = loaded(tmp_path)
    (graph,) = tmp_path.iterdir()
    graph.unlink()
    graph.mkdir()
    np.testing.assert_array_equal(loaded(tmp_path), right)
    assert list(tmp_path.iterdir()) == [graph]


def test_engines_that_build_it_at_once_leave_one_whole_graph(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as engines:
        answers = list(engines.map(loaded, [tmp_path] * 8))
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    assert len(list(tmp_path.iterdir())) == 1
    np.testing.assert_array_equal(loaded(tmp_path), answers[0])
