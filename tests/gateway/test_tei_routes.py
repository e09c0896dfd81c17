"""TEI's routes as reference/tei.md has them: a table of requests and replies, errors included, on real instances."""

import json
from typing import Any

import numpy as np
import pytest

from appliance.wire.quantization import CONVERSIONS
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.texts import mixed_texts
from tests.gateway.conftest import Http

M, S, R, C = "/instances/minilm", "/instances/sparse", "/instances/reranker", "/instances/classifier"


def shape(value: Any) -> Any:
    """A reply without its numbers: lists as their length and first entry, objects as their keys."""
    if isinstance(value, list):
        return [len(value), shape(value[0])] if value else []
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    return type(value).__name__


SCORES = {"score": "float", "label": "str"}
RANK = {"index": "int", "score": "float"}
TOKEN = {"id": "int", "text": "str", "special": "bool", "start": "NoneType", "stop": "NoneType"}
REPLIES: list[tuple[str, dict[str, Any], Any]] = [
    # Input: a string, token ids, a batch, mixed kinds
    (f"{M}/embed", {"inputs": "hello"}, [1, [384, "float"]]),
    (f"{M}/embed", {"inputs": ["hello"]}, [1, [384, "float"]]),
    (f"{M}/embed", {"inputs": [101, 7592, 102]}, [1, [384, "float"]]),
    (f"{M}/embed", {"inputs": ["hello", [101, 7592, 102], "you"]}, [3, [384, "float"]]),
    (f"{M}/embed", {"inputs": "hello", "dimensions": 7}, [1, [7, "float"]]),
    (f"{M}/embed", {"inputs": "hello", "truncate": None, "prompt_name": None, "dimensions": None}, [1, [384, "float"]]),
    (f"{M}/embed", {"inputs": "hello", "unknown": {"field": 1}}, [1, [384, "float"]]),
    (f"{M}/embed", {"inputs": "word " * 2000, "truncation_direction": "Left"}, [1, [384, "float"]]),
    (f"{M}/embed_all", {"inputs": "hello world"}, [1, [4, [384, "float"]]]),
    (f"{M}/embed_all", {"inputs": ["hello world", "you"]}, [2, [4, [384, "float"]]]),
    (f"{S}/embed_sparse", {"inputs": ["hello world", "you"]}, None),
    (f"{R}/rerank", {"query": "a", "texts": ["b", "c"]}, [2, RANK]),
    (
        f"{R}/rerank",
        {"query": "a", "texts": ["b"], "return_text": True},
        [1, {"index": "int", "text": "str", "score": "float"}],
    ),
    (f"{R}/rerank", {"query": "a", "texts": [f"text {n}" for n in range(100)], "raw_scores": True}, [100, RANK]),
    (f"{C}/predict", {"inputs": "hello"}, None),
    (f"{C}/predict", {"inputs": ["hello"]}, None),
    (f"{C}/predict", {"inputs": ["a pair", "of texts"]}, None),
    (f"{C}/predict", {"inputs": [["hello"], ["a pair", "of texts"]]}, None),
    (f"{M}/similarity", {"inputs": {"source_sentence": "hi", "sentences": ["hello", "car"]}}, [2, "float"]),
    (
        f"{M}/similarity",
        {"inputs": {"source_sentence": "hi", "sentences": ["hello"]}, "parameters": {"truncate": True}},
        [1, "float"],
    ),
    (f"{M}/tokenize", {"inputs": "hello world"}, [1, [4, TOKEN]]),
    (f"{M}/tokenize", {"inputs": ["hello world", "x"]}, [2, [4, TOKEN]]),
    (
        f"{M}/tokenize",
        {"inputs": "hello", "add_special_tokens": False},
        [1, [1, {**TOKEN, "start": "int", "stop": "int"}]],
    ),
    (f"{M}/decode", {"ids": [101, 7592, 2088, 102]}, [1, "str"]),
    (f"{M}/decode", {"ids": [[101, 7592], [2088]]}, [2, "str"]),
    # POST / does what the model is for
    (f"{M}/", {"inputs": "hello"}, [1, [384, "float"]]),
    (f"{S}/", {"inputs": "hello"}, None),
    (f"{R}/", {"query": "a", "texts": ["b", "c"]}, [2, RANK]),
    (f"{C}/", {"inputs": "hello"}, None),
]


@pytest.mark.parametrize(("path", "body", "wanted"), REPLIES, ids=lambda value: None)
def test_each_accepted_shape_has_teis_reply(zoo: Http, path: str, body: dict[str, Any], wanted: Any) -> None:
    reply = zoo.post(path, body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["Content-Type"].startswith("application/json")
    if wanted is not None:
        assert shape(reply.json()) == wanted


TEXT = "text/plain"
JSON = "application/json"
REFUSALS: list[tuple[str, Any, int, str, str | None]] = [
    (f"{M}/embed", {"inputs": ""}, 400, JSON, "Empty"),
    (f"{M}/embed", {"inputs": []}, 400, JSON, "Empty"),
    (f"{M}/embed", {"inputs": ["a", ""]}, 400, JSON, "Empty"),
    (f"{M}/embed", {"inputs": ["a", []]}, 400, JSON, "Empty"),
    (f"{M}/embed", {"inputs": None}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": 5}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": ["a", 5]}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": [1, -5]}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": [True]}, 422, TEXT, None),
    (f"{M}/embed", {}, 422, TEXT, None),
    (f"{M}/embed", [], 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "normalize": None}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "normalize": "yes"}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "truncation_direction": None}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "truncation_direction": "up"}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "dimensions": -1}, 422, TEXT, None),
    (f"{M}/embed", {"inputs": "a", "dimensions": 0}, 422, JSON, "Validation"),
    (f"{M}/embed", {"inputs": "a", "dimensions": 385}, 422, JSON, "Validation"),
    (f"{M}/embed", {"inputs": ["a", "b"], "dimensions": 385}, 422, JSON, "Validation"),
    (f"{M}/embed", {"inputs": "a", "prompt_name": "no such"}, 422, JSON, "Validation"),
    (f"{M}/embed", {"inputs": "word " * 2000, "truncate": False}, 422, JSON, "Validation"),
    (f"{M}/embed", {"inputs": ["a", "word " * 2000], "truncate": False}, 422, JSON, "Validation"),
    (f"{M}/embed_sparse", {"inputs": "a"}, 424, JSON, "Backend"),
    (f"{M}/rerank", {"query": "a", "texts": ["b"]}, 424, JSON, "Backend"),
    (f"{M}/predict", {"inputs": "a"}, 424, JSON, "Backend"),
    (f"{R}/embed", {"inputs": "a"}, 424, JSON, "Backend"),
    (f"{C}/embed", {"inputs": ["a", "b"]}, 424, JSON, "Backend"),
    (f"{S}/embed_all", {"inputs": "a"}, 424, JSON, "Backend"),
    (f"{R}/rerank", {"query": "a", "texts": []}, 400, JSON, "Empty"),
    (f"{R}/rerank", {"query": "a"}, 422, TEXT, None),
    (f"{R}/rerank", {"query": 1, "texts": ["b"]}, 422, TEXT, None),
    (f"{C}/predict", {"inputs": []}, 422, TEXT, None),
    (f"{C}/predict", {"inputs": [[]]}, 422, TEXT, None),
    (f"{C}/predict", {"inputs": ["a", "b", "c"]}, 422, TEXT, None),
    (f"{C}/predict", {"inputs": ""}, 400, JSON, "Empty"),
    (f"{M}/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, JSON, "Empty"),
    (f"{M}/similarity", {"inputs": "a"}, 422, TEXT, None),
    (f"{M}/tokenize", {"inputs": 1}, 422, TEXT, None),
    (f"{M}/decode", {"ids": ["a"]}, 422, TEXT, None),
    (f"{M}/decode", {"ids": []}, 400, JSON, "Empty"),
    ("/tokenize", {"inputs": "a"}, 404, JSON, "NotFound"),  # four instances, none named, and all have tokens
    ("/embed", {"inputs": "a", "model": "nobody"}, 404, JSON, "NotFound"),
    ("/instances/nobody/embed", {"inputs": "a"}, 404, JSON, "NotFound"),
    (f"{M}/no_such_route", {}, 404, JSON, "NotFound"),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "error_type"), REFUSALS, ids=lambda value: None)
def test_each_refusal_has_teis_status_and_body(
    zoo: Http, path: str, body: Any, status: int, kind: str, error_type: str | None
) -> None:
    reply = zoo.post(path, body)
    assert (reply.status_code, reply.headers["Content-Type"].partition(";")[0]) == (status, kind), reply.text
    if kind == JSON:
        assert reply.json()["error_type"] == error_type
        assert reply.json()["error"]
    else:
        assert reply.text


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"Content-Type": JSON}, 400),
        (b'{"inputs": "\\ud800"}', {"Content-Type": JSON}, 400),
        (b'{"inputs": NaN}', {"Content-Type": JSON}, 400),
        (b"\xff\xfe", {"Content-Type": JSON}, 400),
        (b"[" * 100_000, {"Content-Type": JSON}, 400),
        (b'{"inputs": "a"}', {"Content-Type": "text/plain"}, 415),
        (b"no json", {}, 400),  # without a type it is taken for JSON
        (b'{"inputs": "a"}', {"Content-Type": JSON, "Content-Encoding": "br"}, 415),
        (b"no gzip", {"Content-Type": JSON, "Content-Encoding": "gzip"}, 400),
    ],
)
def test_what_never_reaches_a_handler_is_plain_text(
    zoo: Http, content: bytes, headers: dict[str, str], status: int
) -> None:
    reply = zoo.post(f"{M}/embed", data=content, headers=headers)
    assert (reply.status_code, reply.headers["Content-Type"].partition(";")[0]) == (status, TEXT)


def test_wrong_verb_says_which_are_right(zoo: Http) -> None:
    reply = zoo.get(f"{M}/embed")
    assert reply.status_code == 405
    assert "POST" in reply.headers["Allow"]


def test_vectors_are_those_of_the_grpc_path_bit_for_bit(zoo: Http) -> None:
    texts = list(mixed_texts(50, seed=3))
    target = mux.Target(instance_name="minilm")
    for text, row in zip(texts, zoo.post(f"{M}/embed", {"inputs": texts}).json(), strict=True):
        request = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        wanted = zoo.running.stub().Embed(mux.EmbedRequest(target=target, request=request)).embeddings
        # Padding differs between a batch and a single text: the last bits may.
        np.testing.assert_allclose(np.array(row, np.float32), np.array(wanted, np.float32), atol=2e-6)


def test_one_text_has_the_very_floats_of_grpc(zoo: Http) -> None:
    request = tei.EmbedRequest(inputs="hello world", truncate=True, normalize=True)
    target = mux.Target(instance_name="minilm")
    wanted = np.array(zoo.running.stub().Embed(mux.EmbedRequest(target=target, request=request)).embeddings, np.float32)
    reply = zoo.post(f"{M}/embed", {"inputs": "hello world"})
    assert np.array(reply.json()[0], np.float32).tobytes() == wanted.tobytes()
    longest = max(len(number) for number in reply.text.strip("[]").split(","))
    assert longest <= 15  # float32 in its shortest form, not a double's digits


def test_normalize_false_is_a_multiple_of_the_unit_vector(zoo: Http) -> None:
    plain = np.array(zoo.post(f"{M}/embed", {"inputs": ["hello", "you"], "normalize": False}).json())
    unit = np.array(zoo.post(f"{M}/embed", {"inputs": ["hello", "you"]}).json())
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), unit, atol=1e-5)


def test_similarity_is_the_cosine(zoo: Http) -> None:
    source, *others = np.array(zoo.post(f"{M}/embed", {"inputs": ["hi", "hello", "a car"]}).json())
    body = {"inputs": {"source_sentence": "hi", "sentences": ["hello", "a car"]}}
    for path in (f"{M}/similarity", f"{M}/"):
        found = zoo.post(path, body).json()
        np.testing.assert_allclose(found, [source @ other for other in others], atol=1e-5)


def test_sparse_entries_ascend_and_equal_grpc(zoo: Http) -> None:
    texts = ["hello world", "another text", "hello world"]
    found = zoo.post(f"{S}/embed_sparse", {"inputs": texts}).json()
    target = mux.Target(instance_name="sparse")
    for text, row in zip(texts, found, strict=True):
        request = mux.EmbedSparseRequest(target=target, request=tei.EmbedSparseRequest(inputs=text, truncate=True))
        wanted = zoo.running.stub().EmbedSparse(request).sparse_embeddings
        assert [entry["index"] for entry in row] == sorted(entry["index"] for entry in row)
        assert {entry["index"] for entry in row} == {entry.index for entry in wanted}
        np.testing.assert_allclose([entry["value"] for entry in row], [entry.value for entry in wanted], atol=1e-5)
    (single,) = zoo.post(f"{S}/embed_sparse", {"inputs": texts[0]}).json()
    assert [entry["index"] for entry in single] == [entry["index"] for entry in found[0]]


def test_ranks_are_sorted_and_complete_beyond_teis_batch_limit(zoo: Http) -> None:
    texts = [f"text number {number}" for number in range(150)]
    for with_text in (False, True):
        found = zoo.post(f"{R}/rerank", {"query": "number 7", "texts": texts, "return_text": with_text}).json()
        assert sorted(rank["index"] for rank in found) == list(range(150))
        scores = [rank["score"] for rank in found]
        assert scores == sorted(scores, reverse=True)
        assert all(rank.get("text") == (texts[rank["index"]] if with_text else None) for rank in found)
    raw = zoo.post(f"{R}/rerank", {"query": "number 7", "texts": texts, "raw_scores": True}).json()
    assert [rank["index"] for rank in raw] == [rank["index"] for rank in found]
    sigmoid = [1 / (1 + np.exp(-rank["score"])) for rank in raw]
    np.testing.assert_allclose(sigmoid, scores, atol=1e-5)


def test_predictions_are_one_list_for_one_input_and_lists_for_a_batch(zoo: Http) -> None:
    one = zoo.post(f"{C}/predict", {"inputs": "hello"}).json()
    scores = [entry["score"] for entry in one]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=1e-5)
    batch = zoo.post(f"{C}/predict", {"inputs": [["hello"], ["a", "pair"]] * 40}).json()
    assert len(batch) == 80
    assert len(batch[0]) == len(one)
    assert [entry["label"] for entry in batch[0]] == [entry["label"] for entry in one]


def test_token_places_are_bytes(zoo: Http) -> None:
    (tokens,) = zoo.post(f"{M}/tokenize", {"inputs": "é world"}).json()
    assert [(token["start"], token["stop"]) for token in tokens] == [(None, None), (0, 2), (3, 8), (None, None)]
    assert tokens[0]["special"]
    assert not tokens[1]["special"]


def test_decode_drops_special_tokens_by_default(zoo: Http) -> None:
    ids = [101, 7592, 2088, 102]
    assert zoo.post(f"{M}/decode", {"ids": ids}).json() == ["hello world"]
    (kept,) = zoo.post(f"{M}/decode", {"ids": ids, "skip_special_tokens": False}).json()
    assert "[CLS]" in kept
    assert "[SEP]" in kept


def test_info_has_teis_keys_in_order(zoo: Http) -> None:
    keys = (
        "model_id model_sha model_dtype served_model_name model_type max_concurrent_requests max_input_length "
        "max_batch_tokens max_batch_requests max_client_batch_size auto_truncate tokenization_workers version sha "
        "docker_label"
    ).split()
    for name, kind in (
        ("minilm", {"embedding": {"pooling": "mean"}}),
        ("sparse", {"embedding": {"pooling": "splade"}}),
    ):
        reply = json.loads(zoo.get(f"/instances/{name}/info").text, object_pairs_hook=list)
        assert [key for key, _ in reply] == keys
        assert zoo.get(f"/instances/{name}/info").json()["model_type"] == kind
    labels = zoo.get("/instances/reranker/info").json()["model_type"]["reranker"]
    assert list(labels["id2label"]) == ["0"]
    assert zoo.get("/instances/classifier/info").json()["model_type"]["classifier"]["label2id"]


def test_compute_headers_are_teis(zoo: Http) -> None:
    for inputs, characters in (("hello wörld", 11), (["hello wörld", "you", "you"], 17)):
        reply = zoo.post(f"{M}/embed", {"inputs": inputs})
        assert reply.headers["x-compute-characters"] == str(characters)
        assert int(reply.headers["x-compute-tokens"]) >= (4 if isinstance(inputs, str) else 10)
        for name in ("x-compute-type", "x-compute-time", "x-total-time", "x-tokenization-time"):
            assert reply.headers[name]
        assert reply.headers["x-queue-time"].isdigit()
        assert reply.headers["x-inference-time"].isdigit()
        parts = dict(part.strip().split(";dur=") for part in reply.headers["Server-Timing"].split(","))
        assert set(parts) == {"queue", "tokenize", "inference", "overhead"}
        assert float(parts["inference"]) > 0
        assert reply.headers["X-TEI-Instance"] == "minilm"


def test_health_is_empty_and_of_the_instance_asked(zoo: Http) -> None:
    for path in ("/health", f"{M}/health"):
        reply = zoo.get(path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert "json" not in reply.headers["Content-Type"]  # which it is not
    zoo.running.create("broken", model_id="no/such-model")
    try:
        reply = zoo.get("/instances/broken/health")
        assert (reply.status_code, reply.json()["error_type"]) == (503, "Unhealthy")
        assert zoo.get("/health").status_code == 200
    finally:
        zoo.running.delete("/instances/broken")


@pytest.mark.parametrize("dtype", list(CONVERSIONS))
def test_vectors_come_in_the_dtype_that_is_asked_for(zoo: Http, dtype: str) -> None:
    plain = np.array(zoo.post(f"{M}/embed", {"inputs": ["a", "b"]}).json(), np.float32)
    found = zoo.post(f"{M}/embed", {"inputs": ["a", "b"], "output_dtype": dtype}).json()
    np.testing.assert_allclose(np.array(found), CONVERSIONS[dtype](plain), atol=1e-3)


def test_a_dtype_that_cannot_be_had_is_refused(zoo: Http) -> None:
    unknown = zoo.post(f"{M}/embed", {"inputs": "a", "output_dtype": "int4"})
    assert (unknown.status_code, "one of float32" in unknown.text) == (422, True)
    long = zoo.post(f"{M}/embed", {"inputs": "a", "output_dtype": "int8", "normalize": False})
    assert (long.status_code, "for vectors of length 1" in long.text) == (422, True)
