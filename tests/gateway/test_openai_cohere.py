"""OpenAI's and Cohere's routes: shapes, values equal to gRPC's, choice of the instance, errors in their own form."""

import base64
from typing import Any

import numpy as np
import pytest

from testing.running import MINILM, eventually
from testing.texts import mixed_texts
from tests.gateway.conftest import Http


def floats(reply: dict[str, Any]) -> np.ndarray:
    assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    return np.array([item["embedding"] for item in reply["data"]], np.float32)


def test_float_and_base64_are_the_same_numbers(zoo: Http) -> None:
    texts = list(mixed_texts(20, seed=5))
    plain = zoo.post("/v1/embeddings", {"model": "minilm", "input": texts, "user": "someone"})
    coded = zoo.post("/v1/embeddings", {"model": "minilm", "input": texts, "encoding_format": "base64"})
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in coded.json()["data"]]
    np.testing.assert_allclose(np.array(decoded), floats(plain.json()), atol=2e-6)
    assert plain.json()["object"] == "list"
    assert {item["object"] for item in plain.json()["data"]} == {"embedding"}
    assert plain.json()["model"] == "minilm"


def test_usage_counts_the_real_tokens(zoo: Http) -> None:
    texts = ["hello world", "hello world", "a"]
    tokens = zoo.post("/instances/minilm/tokenize", {"inputs": texts}).json()
    reply = zoo.post("/v1/embeddings", {"model": "minilm", "input": texts}).json()
    wanted = sum(map(len, tokens))
    assert reply["usage"] == {"prompt_tokens": wanted, "total_tokens": wanted}


def test_token_ids_are_the_text_that_they_spell(zoo: Http) -> None:
    ids = [token["id"] for token in zoo.post("/instances/minilm/tokenize", {"inputs": "hello world"}).json()[0]]
    wanted = floats(zoo.post("/v1/embeddings", {"model": "minilm", "input": "hello world"}).json())
    for given in (ids, [ids], [ids, "hello world"]):
        found = floats(zoo.post("/v1/embeddings", {"model": "minilm", "input": given}).json())
        np.testing.assert_allclose(found, np.repeat(wanted, len(found), axis=0), atol=2e-6)


def test_dimensions_are_cut_then_normalised(zoo: Http) -> None:
    whole = floats(zoo.post("/v1/embeddings", {"model": "minilm", "input": ["a", "b"]}).json())[:, :10]
    short = floats(zoo.post("/v1/embeddings", {"model": "minilm", "input": ["a", "b"], "dimensions": 10}).json())
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "model", "headers"),
    [
        ("/v1/embeddings", "minilm", {}),
        ("/v1/embeddings", "sentence-transformers/all-MiniLM-L6-v2", {}),
        ("/v1/embeddings", None, {"X-TEI-Instance": "minilm"}),
        ("/v1/embeddings", None, {"X-TEI-Model": "sentence-transformers/all-MiniLM-L6-v2"}),
        ("/v1/embeddings", "text-embedding-3-small", {"X-TEI-Instance": "minilm"}),
        ("/instances/minilm/v1/embeddings", "text-embedding-3-small", {}),
        ("/instances/minilm/embeddings", None, {}),
    ],
)
def test_every_way_to_choose_an_instance(zoo: Http, path: str, model: str | None, headers: dict[str, str]) -> None:
    reply = zoo.post(path, {"input": "a", **({"model": model} if model else {})}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-TEI-Instance"] == "minilm"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"input": "a", "model": "minilmm"}, 404, "model_not_found"),
        ({"input": "", "model": "minilm"}, 400, "empty"),
        ({"input": ["a", ""], "model": "minilm"}, 400, "empty"),
        ({"model": "minilm"}, 400, "shape"),
        ({"input": {"a": 1}, "model": "minilm"}, 400, "shape"),
        ({"input": "a", "model": 7}, 400, "shape"),
        ({"input": "a", "model": "minilm", "encoding_format": "float16"}, 400, "shape"),
        ({"input": "a", "model": "minilm", "dimensions": 10_000}, 400, "validation"),
        ({"input": "a", "model": "reranker"}, 400, "backend"),
        ({"input": ["a"] * 100_001, "model": "minilm"}, 400, "validation"),
    ],
)
def test_errors_are_openais_object(zoo: Http, body: dict[str, Any], status: int, code: str) -> None:
    reply = zoo.post("/v1/embeddings", body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    if code == "model_not_found":
        assert "minilm (sentence-transformers/all-MiniLM-L6-v2)" in error["message"]  # it lists what exists


def test_models_are_the_instances(zoo: Http) -> None:
    reply = zoo.get("/v1/models").json()
    assert zoo.get("/models").json() == reply  # infinity's
    assert [model["id"] for model in reply["data"]] == ["classifier", "minilm", "reranker", "sparse"]
    assert all(model["created"] > 1_700_000_000 for model in reply["data"])
    assert zoo.get("/v1/models/minilm").json()["root"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert zoo.get("/v1/models/sentence-transformers/all-MiniLM-L6-v2").json()["id"] == "minilm"
    assert zoo.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"
    assert len(zoo.get("/instances/minilm/v1/models").json()["data"]) == 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank_in_cohere_and_jina_form(zoo: Http, path: str) -> None:
    documents = ["Paris is in France", {"text": "Berlin"}, {"text": "Rome", "id": 3}]
    body = {"model": "reranker", "query": "capital of France", "documents": documents, "return_documents": True}
    reply = zoo.post(path, body).json()
    texts = ["Paris is in France", "Berlin", "Rome"]
    ranks = zoo.post("/instances/reranker/rerank", {"query": "capital of France", "texts": texts}).json()
    assert [found["index"] for found in reply["results"]] == [rank["index"] for rank in ranks]
    scores = [found["relevance_score"] for found in reply["results"]]
    assert scores == pytest.approx([rank["score"] for rank in ranks], abs=1e-6)  # the last bits depend on the batch
    by_index = {found["index"]: found["document"] for found in reply["results"]}
    assert by_index == {0: {"text": "Paris is in France"}, 1: {"text": "Berlin"}, 2: {"text": "Rome", "id": 3}}
    top = zoo.post(path, {**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert [found["index"] for found in top] == [found["index"] for found in reply["results"][:2]]
    assert [found["relevance_score"] for found in top] == pytest.approx(scores[:2], abs=1e-6)
    assert all(found.keys() == {"index", "relevance_score"} for found in top)
    assert reply["usage"]["total_tokens"] > 0
    assert reply["meta"]["api_version"]["version"] == path[2]


def test_rank_fields_choose_what_is_read(zoo: Http) -> None:
    documents = [{"title": "Paris", "body": "in France"}, {"title": "Rome", "body": "in Italy"}]
    body = {"model": "reranker", "query": "q", "documents": documents, "rank_fields": ["title", "body"]}
    scores = {found["index"]: found["relevance_score"] for found in zoo.post("/v1/rerank", body).json()["results"]}
    texts = ["title: Paris\nbody: in France", "title: Rome\nbody: in Italy"]
    ranks = zoo.post("/instances/reranker/rerank", {"query": "q", "texts": texts}).json()
    assert scores == pytest.approx({rank["index"]: rank["score"] for rank in ranks}, abs=1e-6)


def test_a_limit_of_tokens_that_would_cut_more_is_refused(zoo: Http) -> None:
    """It was ignored: the vector of another text than the client asked for."""
    body = {"model": "minilm", "texts": ["a b c"], "input_type": "search_query", "embedding_types": ["float"]}
    refused = zoo.post("/v2/embed", {**body, "max_tokens": 2})
    assert (refused.status_code, "`max_tokens` cannot be less than the 256 tokens" in refused.text) == (400, True)
    for most in (256, 512, None):
        assert zoo.post("/v2/embed", {**body, "max_tokens": most}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": "a", "documents": ["b"], "model": "nobody"}, 404),
        ({"query": "a", "documents": [], "model": "reranker"}, 400),
        ({"query": "a", "documents": ["b", ""], "model": "reranker"}, 400),
        ({"query": "a", "documents": [{"title": "b"}], "model": "reranker"}, 400),
        ({"query": "a", "documents": ["b"], "model": "reranker", "top_n": 0}, 400),
        ({"query": "a", "documents": ["b"], "model": "minilm"}, 400),
        ({"documents": ["b"], "model": "reranker"}, 400),
        ({"query": "a", "documents": ["b"], "model": "reranker", "max_tokens_per_doc": 8}, 400),
        ({"query": "a", "documents": ["b"], "model": "reranker", "max_tokens_per_doc": "many"}, 400),
        ({"query": "a", "documents": ["b"], "model": "reranker", "max_tokens_per_doc": 4096}, 200),
        ({"query": "a", "documents": ["b"], "model": "reranker", "max_chunks_per_doc": 10}, 400),
        ({"query": "a", "documents": ["b"], "model": "reranker", "max_chunks_per_doc": 1}, 200),
    ],
)
def test_cohere_errors_have_a_message(zoo: Http, body: dict[str, Any], status: int) -> None:
    reply = zoo.post("/v2/rerank", body)
    assert reply.status_code == status, reply.text
    if status == 200:
        return
    assert reply.json()["message"]
    assert reply.json()["message"] == reply.json()["detail"]


def test_a_stopped_a_failed_and_a_loading_instance_say_so(zoo: Http) -> None:
    body = {"model": "later", "input": "a"}
    zoo.running.create("later", model_id="no/such-model")
    try:
        reply = zoo.post("/v1/embeddings", body)
        assert reply.status_code == 503
        assert zoo.running.post("/instances/later/stop").status_code == 200
        # The multiplexer looks at the state file a few times a second.
        eventually(lambda: "is stopped: start it with" in zoo.post("/v1/embeddings", body).text)
        reply = zoo.post("/v1/embeddings", body)
        assert reply.status_code == 503
        assert "is stopped: start it with" in reply.json()["error"]["message"]
    finally:
        zoo.running.delete("/instances/later")
    zoo.running.create("loading", model_id=MINILM)
    try:
        health = zoo.get("/instances/loading/health")  # which neither waits nor wakes
        assert health.status_code == 503
        assert "still loading its model" in health.text
        assert "at most 300 s" in health.text
        assert int(health.headers["Retry-After"]) >= 1
        reply = zoo.post("/v1/embeddings", {**body, "model": "loading"})  # which waits
        assert reply.status_code == 200
        assert zoo.get("/instances/loading/health").status_code == 200
        assert zoo.running.post("/instances/loading/sleep").status_code == 200
        assert zoo.get("/instances/loading/health").status_code == 200
        assert zoo.running.instance("loading")["status"] == "sleeping"
    finally:
        zoo.running.delete("/instances/loading")
