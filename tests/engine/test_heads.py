"""Models that give more than one pooled vector, against the numbers of libraries (scripts/reference_heads.py)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from appliance.core.problems import Problem
from appliance.drivers.modelfolder import read_card
from appliance.engine.model import LoadedModel
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import HEADS, ServedModel

COLBERTS = ["colbert", "colbert-pylate", "colbert-stanford"]
NEAR: dict[str, Any] = dict(atol=1e-4)


def expected(name: str) -> Any:
    return json.loads((HEADS / name / "expected.json").read_text())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running: dict[str, ServedModel] = {}
    room = tmp_path_factory.mktemp("graphs")

    def model(name: str) -> ServedModel:
        if name not in running:
            running[name] = ServedModel(HEADS / name, room)
        return running[name]

    yield model
    for each in running.values():
        each.stop()


def token_vectors(model: ServedModel, texts: list[str], role: str | None) -> list[np.ndarray]:
    requests = [tei.EmbedAllRequest(inputs=text, truncate=True, prompt_name=role) for text in texts]
    replies = model.stub("Embed").EmbedAllStream(iter(requests))
    return [np.array([token.embeddings for token in reply.token_embeddings]) for reply in replies]


@pytest.mark.parametrize("role", ["query", "document", None])
@pytest.mark.parametrize("name", COLBERTS)
def test_token_vectors_equal_the_librarys(served: Any, name: str, role: str | None) -> None:
    """A text without a role is a document."""
    wanted = expected(name)
    texts = wanted["queries"] if role == "query" else wanted["texts"]
    for found, rows in zip(token_vectors(served(name), texts, role), wanted[role or "document"], strict=True):
        np.testing.assert_allclose(found, rows, **NEAR)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", COLBERTS)
def test_rerank_is_maxsim(served: Any, name: str, raw: bool) -> None:
    """Its mean over the vectors of the query, unless raw."""
    wanted = expected(name)
    for at, query in enumerate(wanted["queries"]):
        request = tei.RerankRequest(query=query, texts=wanted["texts"], truncate=True, raw_scores=raw)
        ranks = served(name).stub("Rerank").Rerank(request).ranks
        scores = {rank.index: rank.score for rank in ranks}
        sums = np.array(wanted["maxsim"][at]) / (1 if raw else len(wanted["query"][at]))
        np.testing.assert_allclose([scores[number] for number in range(len(sums))], sums, **NEAR)
        assert [rank.index for rank in ranks] == sorted(scores, key=lambda number: -scores[number])


@pytest.mark.parametrize("name", COLBERTS)
def test_a_model_of_token_vectors_has_no_other(served: Any, name: str) -> None:
    for call, request in (("Embed", tei.EmbedRequest), ("EmbedSparse", tei.EmbedSparseRequest)):
        with pytest.raises(grpc.RpcError) as failed:
            getattr(served(name).stub("Embed"), call)(request(inputs="a"))
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "is a multivector model" in failed.value.details()


def test_a_query_over_its_limit_is_cut_or_refused(served: Any) -> None:
    model = served("colbert-stanford")
    (found,) = token_vectors(model, ["word " * 40], "query")
    assert len(found) == 14
    with pytest.raises(grpc.RpcError) as failed:
        model.stub("Embed").EmbedAll(tei.EmbedAllRequest(inputs="word " * 40, prompt_name="query"))
    assert "less than 14 tokens" in failed.value.details()


def test_one_pass_gives_what_bge_m3_gives(served: Any) -> None:
    wanted, stub = expected("bge-m3"), served("bge-m3").stub("Embed")
    texts = wanted["texts"]
    dense = [reply.embeddings for reply in stub.EmbedStream(tei.EmbedRequest(inputs=t, truncate=True) for t in texts)]
    np.testing.assert_allclose(dense, wanted["embeddings"], **NEAR)
    sparse = stub.EmbedSparseStream(tei.EmbedSparseRequest(inputs=text, truncate=True) for text in texts)
    for reply, entries in zip(sparse, wanted["sparse"], strict=True):
        assert [entry.index for entry in reply.sparse_embeddings] == [index for index, _ in entries]
        values = [entry.value for entry in reply.sparse_embeddings]
        np.testing.assert_allclose(values, [value for _, value in entries], **NEAR)
    for found, rows in zip(token_vectors(served("bge-m3"), texts, None), wanted["tokens"], strict=True):
        np.testing.assert_allclose(found, rows, **NEAR)


def test_bge_m3_ranks_by_its_token_vectors(served: Any) -> None:
    """It was scored as if it were a cross-encoder, and could not be."""
    model = served("bge-m3")
    texts = expected("bge-m3")["texts"]
    reply = model.stub("Rerank").Rerank(tei.RerankRequest(query=texts[0], texts=texts, truncate=True))
    query, *documents = token_vectors(model, [texts[0], *texts], None)
    wanted = [float((query @ document.T).max(axis=1).sum()) for document in documents]
    scores = {rank.index: rank.score for rank in reply.ranks}
    order = sorted(range(len(texts)), key=lambda at: -wanted[at])
    assert [rank.index for rank in reply.ranks] == order
    assert scores[order[0]] > scores[order[-1]]


def test_a_language_model_judges_documents(served: Any) -> None:
    wanted, model = expected("qwen3-judge"), served("qwen3-judge")
    query = wanted["pairs"][0][0]
    request = tei.RerankRequest(query=query, texts=[text for _, text in wanted["pairs"]], raw_scores=True)
    scores = {rank.index: rank.score for rank in model.stub("Rerank").Rerank(request).ranks}
    np.testing.assert_allclose([scores[number] for number in range(len(scores))], wanted["scores"], **NEAR)


def test_a_long_document_is_cut_and_the_question_after_it_stays(served: Any) -> None:
    model = served("qwen3-judge")
    after = model.model.tokens.parts[2]
    for left in (False, True):
        encoding = model.model.tokens.encode(("query", "word " * 2000), truncate=True, left=left)
        assert model.model.max_tokens - 8 < len(encoding) <= model.model.max_tokens
        assert model.model.tokens.tokenizer.decode(encoding.ids, skip_special_tokens=False).endswith(after)
    for pair, words in ((("query", "word " * 2000), "less than"), (("word " * 2000, "text"), "leaves no room")):
        with pytest.raises(Problem, match=words):
            model.model.tokens.encode(pair, truncate=words != "less than")


@pytest.mark.parametrize("left", [False, True])
def test_letters_of_several_tokens_are_cut_as_a_whole(served: Any, left: bool) -> None:
    """An owl is four tokens here: without it the document is shorter by one letter, and by all four."""
    tokens = served("qwen3-judge").model.tokens
    fixed = len(tokens.encode(("query", "a"), truncate=False)) - 1
    for extra in range(1, 9):
        owls = "🦉" * ((tokens.max_tokens - fixed) // 4) + "🦉abcd"[: extra // 2 + 1]
        for document in (owls, owls[::-1]):
            encoding = tokens.encode(("query", document), truncate=True, left=left)
            assert len(encoding) <= tokens.max_tokens


def damaged(folder: Path, name: str, file: str, content: str) -> Path:
    copy = folder / name
    shutil.copytree(HEADS / name, copy)
    (copy / file).write_text(content)
    return copy


@pytest.mark.parametrize(
    ("name", "file", "content", "words"),
    [
        ("qwen3-judge", "chat_template.jinja", "{{ messages[0]['content'] }}", "no place for a query and a document"),
        ("qwen3-judge", "chat_template.jinja", "{% for %}", "chat template cannot be used"),
        ("qwen3-judge", "chat_template.jinja", "{{ ''.__class__.__mro__ }}", "chat template cannot be used"),
        ("qwen3-judge", "1_LogitScore/config.json", '{"true_token_id": 99999}', "tokens \\[99999\\] of the answers"),
        ("bge-m3", "sparse_linear.pt", "not a zip", "Cannot read the weights .*sparse_linear.pt"),
        ("colbert", "1_Dense/config.json", '{"use_residual": true, "bias": false}', "has no residual.weight"),
        ("colbert", "1_Dense/config.json", "{}", "has no linear.bias"),
        ("colbert-pylate", "config_sentence_transformers.json", '{"query_length": [1]}', "of the wrong shape"),
        ("colbert", "sentence_bert_config.json", '{"document_length": 1e999}', "of the wrong shape"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, name: str, file: str, content: str, words: str) -> None:
    with pytest.raises(Problem, match=words):
        LoadedModel(damaged(tmp_path, name, file, content), tmp_path / "graphs", threads=1)


def test_cards_say_what_a_model_does() -> None:
    assert read_card(HEADS / "bge-m3").tasks == {"embedding", "sparse", "multivector"}
    assert read_card(HEADS / "colbert").tasks == {"multivector"}
    assert read_card(HEADS / "qwen3-judge").tasks == {"reranker"}
