"""Every family and head against transformers' own numbers (scripts/reference_families.py), over gRPC.

Scores agree to 1e-4, labels and the order of tokens exactly. The models are small and their weights random; the real
MiniLM is compared in test_minilm.py.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.core.families import architecture_of
from appliance.core.problems import Problem
from appliance.engine.model import LoadedModel
from appliance.engine.runtime import PaddedBatch, padded
from appliance.engine.worker import split
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, Engine, ServedModel

NEAR: dict[str, Any] = dict(abs=1e-4)
ALL = sorted(folder.name for folder in FAMILIES.iterdir())
SPLADE = [name for name in ALL if name.endswith("splade")]
SCORES = [name for name in ALL if name.endswith(("rerank", "classify"))]
ADAPTED = "jina-v3-adapters-mean"
DENSE = [name for name in ALL if name not in SPLADE + SCORES]


def expected(name: str) -> Any:
    return json.loads((FAMILIES / name / "expected.json").read_text())


def has_long_graph(name: str) -> bool:
    """Whether the model takes rows of any length: those with a table of positions end with the table."""
    architecture = architecture_of(json.loads((FAMILIES / name / "config.json").read_text()))
    return architecture.embeddings.positions is None and architecture.attention.relative != "deberta"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """name -> its model, served in this process from when it is first asked for."""
    running: dict[str, ServedModel] = {}
    room = tmp_path_factory.mktemp("graphs")

    def engine(name: str) -> ServedModel:
        if name not in running:
            running[name] = ServedModel(FAMILIES / name, room, "splade" if name in SPLADE else None)
        return running[name]

    yield engine
    for each in running.values():
        each.stop()


@pytest.mark.parametrize("name", DENSE)
def test_dense_vectors_equal_sentence_transformers(engines: Any, name: str) -> None:
    wanted = expected(name)
    requests = [tei.EmbedRequest(inputs=text, truncate=True) for text in wanted["texts"]]
    vectors = [reply.embeddings for reply in engines(name).stub("Embed").EmbedStream(iter(requests))]
    np.testing.assert_allclose(np.array(vectors), np.array(wanted["embeddings"]), atol=1e-4)


def test_each_text_is_computed_with_the_adapter_whose_name_its_prompt_has(engines: Any) -> None:
    """Beside texts with other adapters, and without one, in the same batches."""
    wanted = expected(ADAPTED)
    names = [*wanted["adapted"], None]
    others = {name: wanted["adapted"].get(name, wanted["embeddings"]) for name in names}
    asked = [(text, name) for text in wanted["texts"] for name in names]
    requests = [tei.EmbedRequest(inputs=text, truncate=True, prompt_name=name) for text, name in asked]
    vectors = [reply.embeddings for reply in engines(ADAPTED).stub("Embed").EmbedStream(iter(requests))]
    rows = [others[name][wanted["texts"].index(text)] for text, name in asked]
    np.testing.assert_allclose(np.array(vectors), np.array(rows), atol=1e-4)


def test_an_instance_may_have_an_adapter_of_its_own(tmp_path: Path) -> None:
    model = LoadedModel(FAMILIES / ADAPTED, tmp_path, threads=1, default_prompt_name="retrieval.passage")
    encodings: list[Any] = [model.tokens.encode("a", True, False, name) for name in (None, "text-matching")]
    assert [encoding.adapter for encoding in encodings] == [1, 2]


def test_the_graph_that_came_with_a_model_of_adapters_is_not_used(tmp_path: Path) -> None:
    """jina-embeddings-v3 has one, which takes one adapter for all texts of a batch."""
    shutil.copytree(FAMILIES / ADAPTED, folder := tmp_path / "model")
    (folder / "model.onnx").write_bytes(b"another one")
    model = LoadedModel(folder, tmp_path / "graphs", threads=1)
    assert model.runtime.shipped is None
    assert model.width == len(expected(ADAPTED)["embeddings"][0])


def test_torch_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="leave it out"):
        LoadedModel(FAMILIES / ADAPTED, tmp_path, threads=1, runtime="torch")


@pytest.mark.parametrize("name", SPLADE)
def test_sparse_vectors_equal_transformers(engines: Any, name: str) -> None:
    wanted = expected(name)
    requests = [tei.EmbedSparseRequest(inputs=text, truncate=True) for text in wanted["texts"]]
    replies = engines(name).stub("Embed").EmbedSparseStream(iter(requests))
    for reply, entries in zip(replies, wanted["sparse"], strict=True):
        sparse = {entry.index: entry.value for entry in reply.sparse_embeddings}
        assert list(sparse) == sorted(sparse)
        theirs = dict(entries)
        for index in sparse.keys() | theirs.keys():  # a value next to zero may be there or not
            assert sparse.get(index, 0.0) == pytest.approx(theirs.get(index, 0.0), **NEAR)


@pytest.mark.parametrize("name", SCORES)
def test_raw_scores_equal_transformers(engines: Any, name: str) -> None:
    wanted = expected(name)
    labels = list(json.loads((FAMILIES / name / "config.json").read_text())["id2label"].values())
    stub = engines(name).stub("Predict")
    for text, logits in zip(wanted["texts"], wanted["logits"]):
        reply = stub.Predict(tei.PredictRequest(inputs=text, truncate=True, raw_scores=True))
        assert {entry.label: entry.score for entry in reply.predictions} == pytest.approx(
            dict(zip(labels, logits)), **NEAR
        )
        assert [entry.score for entry in reply.predictions] == sorted(
            (entry.score for entry in reply.predictions), reverse=True
        )
    for pair, logits in zip(wanted["pairs"], wanted["pair_logits"]):
        reply = stub.PredictPair(tei.PredictPairRequest(inputs=pair, truncate=True, raw_scores=True))
        assert {entry.label: entry.score for entry in reply.predictions} == pytest.approx(
            dict(zip(labels, logits)), **NEAR
        )


@pytest.mark.parametrize("name", [name for name in SCORES if name.endswith("rerank")])
def test_rerank_orders_by_score_as_unary_and_as_stream(engines: Any, name: str) -> None:
    wanted = expected(name)
    query, texts = wanted["pairs"][0][0], [pair[1] for pair in wanted["pairs"]]
    raw = np.array(wanted["pair_logits"])[:, 0]
    stub = engines(name).stub("Rerank")
    unary = stub.Rerank(tei.RerankRequest(query=query, texts=texts, truncate=True, return_text=True))
    assert [rank.index for rank in unary.ranks] == list(np.argsort(raw)[::-1])
    assert [rank.score for rank in unary.ranks] == pytest.approx(sorted(1 / (1 + np.exp(-raw)), reverse=True), **NEAR)
    assert [rank.text for rank in unary.ranks] == [texts[rank.index] for rank in unary.ranks]
    messages = (tei.RerankStreamRequest(query=query, text=text, truncate=True, return_text=True) for text in texts)
    streamed = stub.RerankStream(messages)
    assert [(rank.index, rank.text) for rank in streamed.ranks] == [(rank.index, rank.text) for rank in unary.ranks]


@pytest.mark.parametrize("name", [name for name in SCORES if name.endswith("classify")])
def test_probabilities_of_a_classifier_sum_to_one(engines: Any, name: str) -> None:
    reply = engines(name).stub("Predict").Predict(tei.PredictRequest(inputs=expected(name)["texts"][0], truncate=True))
    assert sum(entry.score for entry in reply.predictions) == pytest.approx(1, **NEAR)
    assert len(reply.predictions) == 3


@pytest.mark.parametrize("name", [name for name in ALL if "offsets" in expected(name)])
def test_tokens_and_byte_offsets_are_the_tokenizers_own(engines: Any, name: str) -> None:
    wanted = expected(name)
    stub = engines(name).stub("Tokenize")
    for text, (ids, offsets) in zip(wanted["texts"], wanted["offsets"]):
        tokens = stub.Tokenize(tei.EncodeRequest(inputs=text, add_special_tokens=True)).tokens
        assert [token.id for token in tokens] == ids
        for token, (begin, end) in zip(tokens, offsets):
            if not token.special:
                assert token.start == len(text[:begin].encode())
                assert token.stop == len(text[:end].encode())
                assert token.text.encode() == text.encode()[token.start : token.stop]
        decoded = stub.Decode(tei.DecodeRequest(ids=ids, skip_special_tokens=True)).text
        assert decoded


def test_dimensions_cut_first_and_normalise_then(engines: Any) -> None:
    stub = engines("bert-cls").stub("Embed")
    text = expected("bert-cls")["texts"][0]
    whole = np.array(stub.Embed(tei.EmbedRequest(inputs=text, truncate=True, normalize=False)).embeddings)
    cut = np.array(stub.Embed(tei.EmbedRequest(inputs=text, truncate=True, dimensions=5)).embeddings)
    np.testing.assert_allclose(cut, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


def test_a_prompt_is_put_in_front(engines: Any) -> None:
    stub = engines("bert-cls").stub("Embed")
    prompted = stub.Embed(tei.EmbedRequest(inputs="river", prompt_name="query")).embeddings
    assert list(prompted) == list(stub.Embed(tei.EmbedRequest(inputs="a the river")).embeddings)


def test_token_vectors_are_pooled_to_the_dense_one(engines: Any) -> None:
    stub = engines("roberta-mean").stub("Embed")
    tokens = stub.EmbedAll(tei.EmbedAllRequest(inputs="the river was cold")).token_embeddings
    mean = np.mean([token.embeddings for token in tokens], axis=0)
    dense = stub.Embed(tei.EmbedRequest(inputs="the river was cold", normalize=False)).embeddings
    np.testing.assert_allclose(mean, dense, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in DENSE if "tokens" in expected(name)])
def test_token_vectors_equal_those_of_the_reference(engines: Any, name: str) -> None:
    wanted = expected(name)
    for text, tokens in zip(wanted["texts"][-2:], wanted["tokens"], strict=True):
        reply = engines(name).stub("Embed").EmbedAll(tei.EmbedAllRequest(inputs=text, truncate=True))
        vectors = np.array([token.embeddings for token in reply.token_embeddings])
        np.testing.assert_allclose(vectors, np.array(tokens), atol=2e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_equals_single_texts(engines: Any, name: str) -> None:
    model = engines(name).model
    rows = [model.tokens.encode(text, truncate=True) for text in expected(name)["texts"]]
    together = split(model.runtime.run(padded(rows, model.card)), [len(row) for row in rows])
    for row, part in zip(rows, together, strict=True):
        (alone,) = split(model.runtime.run(padded([row], model.card)), [len(row)])
        np.testing.assert_allclose(part, alone, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in ALL if has_long_graph(name)])
@pytest.mark.parametrize("tokens", [1, 255, 256, 700])
def test_the_graph_for_long_rows_computes_what_the_other_does(engines: Any, name: str, tokens: int) -> None:
    """Of three blocks at most, the last of them not full; the models' windows are far smaller than a block."""
    model = engines(name).model
    ids = np.random.default_rng(tokens).integers(5, 60, (1, tokens))
    feed = PaddedBatch(ids, np.ones_like(ids), np.zeros_like(ids), np.ones(1, np.int64))._asdict()
    whole = model.runtime.session(long=False).run(feed, False, None)
    np.testing.assert_allclose(model.runtime.session(long=True).run(feed, False, None), whole, atol=2e-4)


@pytest.mark.processes
def test_an_unknown_architecture_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    config = json.loads((FAMILIES / "bert-cls" / "config.json").read_text())
    for file in (FAMILIES / "bert-cls").rglob("*"):
        if file.is_file():
            target = tmp_path / "model" / file.relative_to(FAMILIES / "bert-cls")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    config |= {"model_type": "xlnet", "architectures": ["XLNetModel"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, tmp_path / "model")
    engine.start()
    assert engine.process.wait(timeout=30) == 1
    assert "XLNetModel" in engine.log.read_text()
    assert "onnx/model.onnx" in engine.log.read_text()
