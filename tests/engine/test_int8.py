"""`--dtype int8` on the real MiniLM: near float32, and the same in every batch; and graphs that OpenVINO takes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from appliance.core.families import HEADS, architecture_of
from appliance.drivers import hub
from appliance.drivers.modelfolder import read_card
from appliance.engine import graph
from appliance.engine.graph.nodes import GraphOptions
from appliance.engine.intake import JointLane, Lane
from appliance.engine.model import LoadedModel
from appliance.engine.pooling import normalized, pooled
from appliance.engine.runtime import OnnxSession, PaddedBatch, onnx_session
from appliance.engine.weights import Tensor, read_float32, tensors_of
from testing.engines import FAMILIES
from testing.running import MINILM
from testing.texts import mixed_texts

TEXTS = mixed_texts(120, seed=31)
NAMES = sorted(folder.name for folder in FAMILIES.iterdir())


def vectors(model: LoadedModel, single: bool) -> np.ndarray:
    """[texts, width], one after the other or all at once."""

    def reduce(part: np.ndarray, encoding: Any) -> np.ndarray:
        return normalized(pooled(part, model.card.pooling))

    if single:
        lane = Lane(model.permits, single)
        return np.array([model.submit(lane, text, reduce, True, False).outcome.result() for text in TEXTS])
    together = JointLane(model.permits, lambda: False)
    jobs = [model.submit(together, text, reduce, True, False) for text in TEXTS]
    together.flush()
    return np.array([job.outcome.result() for job in jobs])


def test_int8_is_near_and_no_text_depends_on_its_neighbours(tmp_path: Path) -> None:
    folder = hub.find(MINILM, None, None)
    exact = vectors(LoadedModel(folder, tmp_path, threads=1), single=False)
    small = LoadedModel(folder, tmp_path, threads=1, dtype="int8")
    found = vectors(small, single=False)
    cosines = (exact * found).sum(axis=1)
    assert cosines.min() > 0.98
    assert cosines.mean() > 0.995
    # A rounding of float32 may fall on the other side of a half, and count as one of 127 steps.
    assert (vectors(small, single=True) * found).sum(axis=1).min() > 0.9999
    kept = sorted(path.stat().st_size for path in tmp_path.glob("*.onnx"))
    assert kept[0] < 2**20 < 8 * 2**20 < kept[-1] < 16 * 2**20  # 10.6 million weights of layers


@pytest.mark.parametrize("name", NAMES)
def test_plain_graphs_compute_what_the_others_do(name: str) -> None:
    card = read_card(FAMILIES / name, "splade" if name.endswith("splade") else None)
    tensors, head = tensors_of(card.folder), HEADS[card.task]
    ids = np.array([[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, card.pad_id, *[card.pad_id] * 4]], np.int64)
    mask = np.array([[1] * 8, [1] * 3 + [0] * 5], np.int64)
    feed = PaddedBatch(ids, mask, np.zeros_like(ids), np.array([1, -1]))._asdict()
    answers = []
    for plain in (False, True):
        built = graph.build(card.config, tensors, head, GraphOptions(plain=plain))
        used = {node.op_type for node in built.graph.node}
        assert not plain or not used & {"RotaryEmbedding", "RMSNormalization", "QuickGelu"}
        session = OnnxSession(built.SerializeToString(), card.folder.resolve(), 1, False, (head,))
        answer = session.run(feed, False, None)
        answers.append(answer if answer.ndim == 2 else answer[mask.astype(bool)])
    np.testing.assert_allclose(answers[1], answers[0], atol=2e-5)
    assert architecture_of(json.loads((FAMILIES / name / "config.json").read_text()), head)


@pytest.mark.parametrize("name", ["nomic-mixture-mean", "jina-v3-adapters-mean"])
def test_experts_and_adapters_are_near_in_int8(tmp_path: Path, name: str) -> None:
    """Experts multiply with parts of a weight, one of them as it lies in the file; adapters stay float32."""
    exact, small = (LoadedModel(FAMILIES / name, tmp_path, threads=1, dtype=dtype) for dtype in (None, "int8"))
    prompt = next(iter(exact.card.prompts), None)
    for text in TEXTS[:20]:
        encodings = [exact.tokens.encode(text, True, False, prompt)]
        one, other = (model.runtime.run(model.runtime.batch(encodings))[0].mean(axis=0) for model in (exact, small))
        assert not np.array_equal(one, other)
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.99


def test_whole_numbers_are_multiplied_exactly_on_every_cpu() -> None:
    """On a CPU without VNNI onnxruntime's own choice has 99.9 % of these products wrong."""
    numbers = np.random.default_rng(0)
    weight = numbers.integers(-127, 128, (384, 64)).astype(np.int8)
    x = numbers.integers(1, 256, (8, 384)).astype(np.uint8)
    node = helper.make_node("MatMulInteger", ["x", "weight", "zero"], ["product"])
    source = helper.make_tensor_value_info("x", TensorProto.UINT8, [None, 384])
    product = helper.make_tensor_value_info("product", TensorProto.INT32, [None, 64])
    kept = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array(128, np.uint8), "zero")]
    model = helper.make_model(
        helper.make_graph([node], "product", [source], [product], kept),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21)],
    )
    session = onnx_session(model.SerializeToString(), None, threads=1, packed=True)
    expected = (x.astype(np.int32) - 128) @ weight.astype(np.int32)
    np.testing.assert_array_equal(session.run(["product"], {"x": x})[0], expected)


def test_half_precision_is_read_as_it_is_written(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    (tmp_path / "raw").write_bytes(values.tobytes() + values.astype(np.float16).tobytes() + upper.tobytes())
    for dtype, offset, length in (("F32", 0, 16), ("F16", 16, 8), ("BF16", 24, 8)):
        tensor = Tensor(tmp_path / "raw", dtype, (2, 2), offset, length)
        np.testing.assert_array_equal(read_float32(tensor), values)
