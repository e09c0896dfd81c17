"""Folders that look like those of known models and are not: right vectors, or a refusal by name, and never others."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper

from appliance.core.families import architecture_of
from appliance.core.problems import Problem
from appliance.drivers.modelfolder import read_card
from appliance.engine import graph
from appliance.engine.graph import heads
from appliance.engine.graph.encoder import EncoderGraph
from appliance.engine.graph.nodes import FUSED, IR_VERSION, OPSET, Nodes, uses
from appliance.engine.model import LoadedModel
from appliance.engine.runtime import PaddedBatch, Runtime
from appliance.engine.weights import tensors_of
from testing.engines import FAMILIES

IDS = np.arange(1, 9, dtype=np.int64)[None]
FEED = PaddedBatch(IDS, np.ones_like(IDS), np.zeros_like(IDS), np.array([-1]))


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(FAMILIES / name, folder)
    return folder


def change(file: Path, **fields: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))


def computed(folder: Path, graphs: Path, dtype: str | None = None, pooling: str | None = None) -> np.ndarray:
    return Runtime(read_card(folder, pooling), graphs, 1, "onnxruntime", dtype).run(FEED)


def near(one: np.ndarray, other: np.ndarray) -> bool:
    cosines = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
    return bool(cosines.min() > 0.98)


def export(folder: Path, model: onnx.ModelProto) -> None:
    """As a folder has it that came with a graph, whose weights lie beside it."""
    external_data_helper.load_external_data_for_model(model, str(folder))
    (folder / "onnx").mkdir()
    file, beside = str(folder / "onnx/model.onnx"), "model.onnx_data"
    onnx.save_model(model, file, save_as_external_data=True, location=beside, size_threshold=1000)


def with_graph(name: str, folder: Path) -> Path:
    copied(name, folder)
    export(folder, graph.build(read_card(folder).config, tensors_of(folder), "hidden"))
    return folder


def negate_weights(folder: Path) -> None:
    """The same file, with the same shapes at the same places."""
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    tensors = {name: each for name, each in tensors_of(folder).items() if "intermediate.dense.weight" in name}
    assert tensors
    for each in tensors.values():
        part = np.frombuffer(raw, np.float32, each.length // 4, each.offset)
        raw[each.offset : each.offset + each.length] = (-part).tobytes()
    file.write_bytes(raw)


def test_int8_is_of_these_weights_and_of_no_other_file_of_the_same_name(tmp_path: Path) -> None:
    one, other = copied("bert-cls", tmp_path / "one"), copied("bert-cls", tmp_path / "other")
    negate_weights(other)
    shared = tmp_path / "graphs"
    assert near(computed(one, shared, "int8"), computed(one, shared))
    assert near(computed(other, shared, "int8"), computed(other, shared))
    assert not near(computed(one, shared), computed(other, shared))
    negate_weights(one)  # trained on, in its place
    assert near(computed(one, shared, "int8"), computed(other, shared))


def test_a_graph_in_the_hub_s_cache_finds_its_weights(tmp_path: Path) -> None:
    plain = with_graph("bert-cls", tmp_path / "plain")
    snapshot = tmp_path / "models--org--m/snapshots" / ("0" * 40)
    (blobs := tmp_path / "models--org--m/blobs").mkdir(parents=True)
    for file in (file for file in plain.rglob("*") if file.is_file()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        link = snapshot / file.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (snapshot / "model.safetensors").unlink()
    np.testing.assert_allclose(computed(snapshot, tmp_path), computed(FAMILIES / "bert-cls", tmp_path), atol=1e-5)


def test_int8_is_not_the_graph_that_came_with_the_model(tmp_path: Path) -> None:
    folder = with_graph("bert-cls", tmp_path / "model")
    exact, small = computed(folder, tmp_path), computed(folder, tmp_path, "int8")
    assert near(exact, small)
    assert not np.array_equal(exact, small)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Problem, match="leave dtype out"):
        computed(folder, tmp_path, "int8")


def export_logits(folder: Path) -> None:
    """Of a bert that fills masks, as optimum exports it."""
    architecture = architecture_of(read_card(folder, "splade").config, "sparse")
    nodes = Nodes(tensors_of(folder), architecture.prefixes)
    logits = heads.logits(nodes, architecture, EncoderGraph(nodes, architecture, False).hidden_states())
    nodes.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    used = set(uses(nodes.nodes))
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in used]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "t"]) for name in names]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "t", "v"])]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
    made = helper.make_model(nodes.graph("bert", inputs, outputs), ir_version=IR_VERSION, opset_imports=opsets)
    export(folder, made)


def test_the_graph_of_a_splade_model_may_end_before_its_vectors(tmp_path: Path) -> None:
    folder = copied("bert-splade", tmp_path / "model")
    export_logits(folder)
    expected = computed(FAMILIES / "bert-splade", tmp_path, pooling="splade")
    np.testing.assert_allclose(computed(folder, tmp_path, pooling="splade"), expected, atol=1e-5)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Problem, match="no output `sparse`"):
        computed(folder, tmp_path, pooling="splade")


def test_logits_are_not_pooled(tmp_path: Path) -> None:
    """An embedder that has the graph of a model that fills masks gave means of logits, as wide as the vocabulary."""
    folder = copied("bert-splade", tmp_path / "model")
    expected = computed(folder, tmp_path, pooling="mean")
    export_logits(folder)
    np.testing.assert_array_equal(computed(folder, tmp_path, pooling="mean"), expected)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Problem, match="has logits, and no hidden states to pool") as refused:
        computed(folder, tmp_path, pooling="mean")
    assert refused.value.code == "UNSUPPORTED_MODEL"


@pytest.mark.parametrize("padding", [{}, {"pad_token_id": None}], ids=["missing", "null"])
def test_a_padding_that_is_not_named_is_the_first_of_roberta(tmp_path: Path, padding: dict[str, Any]) -> None:
    folder = copied("roberta-mean", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("pad_token_id") == 1
    (folder / "config.json").write_text(json.dumps({**config, **padding}))
    model, known = (LoadedModel(each, tmp_path / "graphs", threads=1) for each in (folder, FAMILIES / "roberta-mean"))
    text = "hello world " * 400
    ids = [each.tokens.encode(text, truncate=True).ids for each in (model, known)]
    assert ids[0] == ids[1]
    row = np.array([ids[0]])
    batch = PaddedBatch(row, np.ones_like(row), np.zeros_like(row), np.array([-1]))
    np.testing.assert_allclose(model.runtime.run(batch), known.runtime.run(batch), atol=1e-6)


def module(kind: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        modules = json.loads((folder / "modules.json").read_text())
        entry = {"idx": 9, "name": "9", "path": "9", "type": f"sentence_transformers.models.{kind}"}
        (folder / "modules.json").write_text(json.dumps([*modules, entry]))

    return add


def pooling(**fields: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "1_Pooling/config.json").write_text(json.dumps(fields))
        change(folder / "config_sentence_transformers.json", prompts={"query": "query: "})

    return write


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "LayerNorm": ("bert-cls", module("LayerNorm"), "LayerNorm"),
    "LSTM": ("bert-cls", module("LSTM.LSTM"), "LSTM"),
    "two poolings": (
        "bert-cls",
        pooling(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True),
        "pooling_mode_cls_token, pooling_mode_mean_tokens",
    ),
    "no prompt in the pooling": (
        "bert-cls",
        pooling(pooling_mode_mean_tokens=True, include_prompt=False),
        "leaves prompts out",
    ),
    "model2vec with shared vectors": (
        "static-mean",
        lambda folder: change(folder / "config.json", vocabulary_quantization=64),
        "vocabulary_quantization",
    ),
}


@pytest.mark.parametrize(("name", "spoil", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_give_other_vectors_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], words: str
) -> None:
    folder = copied(name, tmp_path / "model")
    LoadedModel(folder, tmp_path / "graphs", threads=1)
    spoil(folder)
    with pytest.raises(Problem, match=words):
        LoadedModel(folder, tmp_path / "graphs", threads=1)


def test_dropout_and_one_pooling_are_taken(tmp_path: Path) -> None:
    folder = copied("bert-cls", tmp_path / "model")
    module("Dropout")(folder)
    pooling(pooling_mode_cls_token=False, pooling_mode_mean_tokens=True, include_prompt=True)(folder)
    assert read_card(folder).pooling == "mean"
    assert read_card(folder, "cls").pooling == "cls"
