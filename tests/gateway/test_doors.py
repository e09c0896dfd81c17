"""The other doors: choice by task, aliases, defaults; requests of Cohere, Ollama, vLLM, Azure, Jina, Voyage, TEI."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import RunningAppliance
from tests.gateway.conftest import Http

pytestmark = pytest.mark.processes
PAIR = {"query": "a", "texts": ["b", "c"]}


def vector(zoo: Http, text: str, **fields: Any) -> np.ndarray:
    body = {"model": "minilm", "input": text, **fields}
    return np.array(zoo.post("/v1/embeddings", body).json()["data"][0]["embedding"], np.float32)


def ok(answer: requests.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- who answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "instance"),
    [
        ("/v1/embeddings", {"input": "a"}, "minilm"),
        ("/embed", {"inputs": "a"}, "minilm"),
        ("/embed_all", {"inputs": "a"}, "minilm"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "minilm"),
        ("/embed_sparse", {"inputs": "a"}, "sparse"),
        ("/rerank", PAIR, "reranker"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "reranker"),
        ("/score", {"text_1": "a", "text_2": "b"}, "reranker"),
        ("/predict", {"inputs": "a"}, "classifier"),  # though a reranker can predict, too
        ("/v2/embed", {"texts": ["a"]}, "minilm"),
        ("/pooling", {"input": "a"}, "minilm"),
    ],
)
def test_the_only_one_for_the_task_answers_what_names_nobody(
    zoo: Http, path: str, body: dict[str, Any], instance: str
) -> None:
    answer = zoo.post(path, body)
    assert (answer.status_code, answer.headers.get("X-TEI-Instance")) == (200, instance), answer.text


def test_where_nothing_fits_best_one_has_to_be_named(zoo: Http) -> None:
    """Every model has tokens."""
    answer = zoo.post("/tokenize", {"inputs": "a"})
    assert (answer.status_code, answer.json()["error_type"]) == (404, "NotFound")
    assert "default" in answer.text


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    """Two embedders, of which one is the default and has aliases."""
    with RunningAppliance(tmp_path_factory.mktemp("named"), seeds="", settings=CORS) as running:
        running.create("one", model_id=str(FAMILIES / "bert-cls"))
        aliases = ["text-embedding-3-small", "BAAI/bge-m3"]
        running.create("other", model_id=str(FAMILIES / "mpnet-mean"), aliases=aliases, default=True)
        for name in ("one", "other"):
            running.wait_ready(name)
        yield Http(running)


CORS = 'cors_allow_origins = ["https://app.example.com"]'


@pytest.mark.parametrize("body", [{}, {"model": "text-embedding-3-small"}, {"model": "BAAI/bge-m3"}], ids=str)
def test_the_default_and_its_aliases(named: Http, body: dict[str, Any]) -> None:
    answer = named.post("/v1/embeddings", {"input": "a", **body})
    assert (answer.status_code, answer.headers["X-TEI-Instance"]) == (200, "other")
    assert named.post("/tokenize", {"inputs": "a"}).headers["X-TEI-Instance"] == "other"


def test_grpc_knows_aliases_as_model_ids(named: Http) -> None:
    request = tei.EmbedRequest(inputs="a")
    by_alias = mux.EmbedRequest(target=mux.Target(model_id="text-embedding-3-small"), request=request)
    by_name = mux.EmbedRequest(target=mux.Target(instance_name="other"), request=request)
    stub = named.running.stub()
    assert stub.Embed(by_alias, timeout=20).embeddings == stub.Embed(by_name, timeout=20).embeddings


def test_an_alias_that_is_another_ones_model_id_means_its_own_instance(named: Http) -> None:
    """Not both in turn: their vectors do not go together."""
    stolen = str(FAMILIES / "bert-cls")  # the model of `one`
    named.running.create("thief", model_id=str(FAMILIES / "mpnet-mean"), aliases=[stolen])
    named.running.wait_ready("thief")
    request = tei.EmbedRequest(inputs="a")
    by_alias = mux.EmbedRequest(target=mux.Target(model_id=stolen), request=request)
    found = {tuple(named.running.stub().Embed(by_alias, timeout=20).embeddings) for _ in range(6)}
    wanted = mux.EmbedRequest(target=mux.Target(instance_name="thief"), request=request)
    assert found == {tuple(named.running.stub().Embed(wanted, timeout=20).embeddings)}
    named.running.delete("/instances/thief")


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "third", "aliases": ["one"]},
        {"name": "third", "aliases": ["text-embedding-3-small"]},
        {"name": "text-embedding-3-small"},
    ],
    ids=str,
)
def test_a_name_means_one_instance(named: Http, fields: dict[str, Any]) -> None:
    answer = named.running.post("/instances", {"model_id": str(FAMILIES / "bert-cls"), **fields})
    assert (answer.status_code, answer.json()["code"]) == (409, "INSTANCE_EXISTS")


# -- pages in a browser -----------------------------------------------------------------------------------------------


def test_a_page_of_an_allowed_origin_may_call(named: Http) -> None:
    asked = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "content-type,authorization"
    preflight = requests.options(f"{named.url}/v1/embeddings", headers=asked, timeout=20)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://app.example.com"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    assert preflight.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
    answer = named.post("/v1/embeddings", {"input": "a"}, headers={"Origin": "https://app.example.com"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example.com"
    assert "Origin" in answer.headers["Vary"]


def test_no_other_page_may(named: Http, zoo: Http) -> None:
    for there, origin in ((named, "https://evil.example.com"), (zoo, "https://app.example.com")):
        answer = there.post("/v1/embeddings", {"input": "a"}, headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in answer.headers


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_json_without_a_content_type_is_json(zoo: Http) -> None:
    answer = requests.post(f"{zoo.url}/embed", data=b'{"inputs": "a"}', timeout=20)
    assert "Content-Type" not in answer.request.headers
    np.testing.assert_allclose(ok(answer)[0], vector(zoo, "a"), atol=2e-6)


def test_documents_at_the_route_of_tei_are_answered_as_cohere_answers(zoo: Http) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}
    (best,) = ok(zoo.post("/rerank", body))["results"]
    scores = {rank["index"]: rank["score"] for rank in ok(zoo.post("/rerank", {"model": "reranker", **PAIR}))}
    assert best["index"] == max(scores, key=lambda index: scores[index])
    assert best["relevance_score"] == pytest.approx(scores[best["index"]], abs=1e-6)


def test_voyage_asks_for_top_k_and_reads_data(zoo: Http) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["b", "c", "d"], "top_k": 2, "truncation": True}
    answer = ok(zoo.post("/v1/rerank", body))
    assert len(answer["data"]) == 2
    assert answer["usage"]["total_tokens"] > 0
    bare = ok(zoo.post("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b"], "return_documents": True}))
    assert bare["data"] == bare["results"]  # nothing in such a request says whose it is
    whole = vector(zoo, "a", output_dimension=10)
    np.testing.assert_allclose(whole, vector(zoo, "a", dimensions=10), atol=2e-6)


def test_jina_sends_objects(zoo: Http) -> None:
    body = {"model": "minilm", "input": [{"text": "a"}, {"text": "b"}], "embedding_type": "base64"}
    data = ok(zoo.post("/v1/embeddings", body))["data"]
    found = np.frombuffer(base64.b64decode(data[1]["embedding"]), "<f4")
    np.testing.assert_allclose(found, vector(zoo, "b"), atol=2e-6)
    assert zoo.post("/v1/embeddings", {"model": "minilm", "input": [{"image": "x"}]}).status_code == 400


TEXT = "rain over the river"
PROMPTS = {
    "retrieval.query": "the query: ",
    "retrieval.passage": "a passage: ",
    "separation": "apart: ",
    "classification": "",
    "text-matching": "",
}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    """An instance `jina` whose model has a prompt and an adapter for each task, and refuses what is too long."""
    model = tmp_path_factory.mktemp("model") / "jina"
    shutil.copytree(FAMILIES / "jina-v3-adapters-mean", model)
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    with RunningAppliance(tmp_path_factory.mktemp("prompted"), seeds="") as running:
        running.create("jina", model_id=str(model), extra_args=["--auto-truncate", "false"])
        running.wait_ready("jina")
        yield Http(running)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"task": "retrieval.query"}, "retrieval.query"),
        ({"task": "retrieval.passage"}, "retrieval.passage"),
        ({"task": "separation"}, "separation"),
        ({"task": "text-matching"}, "text-matching"),
        ({"input_type": "query"}, "retrieval.query"),
        ({"input_type": "document"}, "retrieval.passage"),
        ({"input_type": "passage", "task": None}, "retrieval.passage"),
        ({"input_type": None}, None),
    ],
    ids=str,
)
def test_the_purpose_of_texts_is_the_model_s_prompt(prompted: Http, fields: dict[str, Any], prompt: str | None) -> None:
    """Jina's, Voyage's and NVIDIA's names; without their words a search finds worse, and nobody sees why."""
    body = {"inputs": TEXT, **({"prompt_name": prompt} if prompt else {})}
    expected, plain = ok(prompted.post("/embed", body))[0], ok(prompted.post("/embed", {"inputs": TEXT}))[0]
    found = ok(prompted.post("/v1/embeddings", {"input": TEXT, **fields}))["data"][0]["embedding"]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert (np.abs(np.subtract(found, plain)).max() > 1e-3) == bool(prompt)


LONG = " ".join(["word"] * 20_000)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"truncation": True}, "right"),
        ({"truncate": True}, "right"),
        ({"truncate": "END"}, "right"),
        ({"truncate": "START"}, "left"),
        ({"truncation": False}, None),
        ({"truncate": False}, None),
        ({"truncate": "NONE"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_is_too_long_is_cut_only_where_that_is_wanted(
    prompted: Http, fields: dict[str, Any], end: str | None
) -> None:
    text = f"rain {LONG} river"
    answer = prompted.post("/v1/embeddings", {"input": text, **fields})
    if end is None:
        assert (answer.status_code, "must have less than" in answer.json()["detail"]) == (400, True)
        return
    body = {"inputs": text, "truncate": True, "truncation_direction": end}
    np.testing.assert_allclose(ok(answer)["data"][0]["embedding"], ok(prompted.post("/embed", body))[0], atol=2e-6)


def test_vectors_keep_their_length_where_that_is_wanted(prompted: Http) -> None:
    found = ok(prompted.post("/v1/embeddings", {"input": TEXT, "normalized": False}))["data"][0]["embedding"]
    expected = ok(prompted.post("/embed", {"inputs": TEXT, "normalize": False}))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(np.linalg.norm(found) - 1) > 0.01


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "nonsense"},
        {"input_type": "nonsense"},
        {"input_type": 1},
        {"truncate": "MIDDLE"},
        {"truncation": 1},
        {"normalized": "no"},
        {"late_chunking": True},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5},
        {"truncate_prompt_tokens": True},
        {"embed_dtype": "float16"},
        {"normalize": "no"},
        {"prompt_name": 1},
        {"normalized": False, "embedding_type": "int8"},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(prompted: Http, fields: dict[str, Any]) -> None:
    answer = prompted.post("/v1/embeddings", {"input": TEXT, **fields})
    assert answer.status_code == 400
    assert any(word in answer.json()["detail"] for word in (*fields, "length 1")), answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/pooling", {"task": "token_embed"}),
        ("/pooling", {"add_special_tokens": False}),
        ("/pooling", {"truncate_prompt_tokens": 5}),
        ("/pooling", {"use_activation": 1}),
        ("/score", {"truncate_prompt_tokens": 5}),
    ],
    ids=str,
)
def test_what_vllm_would_do_and_we_do_not_is_refused(prompted: Http, path: str, fields: dict[str, Any]) -> None:
    """The vectors were others than those that were asked for, with 200."""
    answer = prompted.post(path, {"input": TEXT, "text_1": TEXT, "text_2": TEXT, **fields})
    assert answer.status_code in (400, 422), answer.text
    assert next(iter(fields)) in answer.text


def test_what_vllm_does_and_we_do_as_well_is_done(prompted: Http) -> None:
    def vector(path: str, **fields: Any) -> Any:
        (found,) = ok(prompted.post(path, {"input": fields.pop("input", TEXT), **fields}))["data"]
        return found["embedding"] if path == "/v1/embeddings" else found["data"]

    raw = ok(prompted.post("/embed", {"inputs": TEXT, "normalize": False}))[0]
    for path, name in (("/v1/embeddings", "normalize"), ("/pooling", "normalize"), ("/pooling", "use_activation")):
        np.testing.assert_allclose(vector(path, **{name: False}), raw, rtol=1e-5)
    with_prompt = ok(prompted.post("/embed", {"inputs": TEXT, "prompt_name": "retrieval.query"}))[0]
    np.testing.assert_allclose(vector("/v1/embeddings", prompt_name="retrieval.query"), with_prompt, rtol=1e-5)
    long = "word " * 1000
    cut = ok(prompted.post("/embed", {"inputs": long, "truncate": True}))[0]
    for path in ("/v1/embeddings", "/pooling"):
        found = vector(path, input=long, truncate_prompt_tokens=-1, add_special_tokens=True, embed_dtype="float32")
        np.testing.assert_allclose(found, cut, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("field", ["output_dtype", "embedding_type", "encoding_type"])
@pytest.mark.parametrize(("kind", "dtype"), [("int8", np.int8), ("uint8", np.uint8), ("binary", np.int8)])
def test_numbers_of_another_kind_are_of_that_kind(zoo: Http, field: str, kind: str, dtype: type) -> None:
    """voyageai reads the bytes as what it asked for: float32 there would be garbage without an error."""
    body = {"model": "minilm", "input": "a", field: kind}
    plain = ok(zoo.post("/v1/embeddings", body))["data"][0]["embedding"]
    coded = ok(zoo.post("/v1/embeddings", {**body, "encoding_format": "base64"}))["data"][0]["embedding"]
    assert len(plain) == (48 if kind == "binary" else 384)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), dtype), plain)
    assert zoo.post("/v1/embeddings", {**body, field: "float8"}).status_code == 400


def test_raw_scores_of_documents_are_raw(zoo: Http) -> None:
    texts = ok(zoo.post("/rerank", {"model": "reranker", **PAIR, "raw_scores": True}))
    body = {"model": "reranker", "query": "a", "documents": PAIR["texts"], "raw_scores": True}
    found = ok(zoo.post("/rerank", body))["results"]
    assert [each["relevance_score"] for each in found] == pytest.approx([each["score"] for each in texts], abs=1e-6)


def test_every_name_is_listed(named: Http) -> None:
    names = {"one", "other", "text-embedding-3-small", "BAAI/bge-m3"}
    listed = ok(named.get("/v1/models"))["data"]
    assert {each["id"] for each in listed} == names
    assert {each["name"] for each in ok(named.get("/api/tags"))["models"]} == {f"{name}:latest" for name in names}
    assert {each["name"] for each in ok(named.get("/openai/v1/models"))["models"]} == names
    alias = ok(named.get("/v1/models/text-embedding-3-small"))
    assert (alias["id"], alias) == (
        "text-embedding-3-small",
        next(each for each in listed if each["id"] == alias["id"]),
    )


def test_azure_has_the_model_in_the_path(zoo: Http) -> None:
    answer = zoo.post("/openai/deployments/minilm/embeddings?api-version=2024-02-01", {"input": "a"})
    np.testing.assert_allclose(ok(answer)["data"][0]["embedding"], vector(zoo, "a"), atol=2e-6)
    wrong = zoo.post("/openai/deployments/nobody/embeddings?api-version=2024-02-01", {"input": "a"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


def test_cohere_embeds_in_every_type(zoo: Http) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    texts = ["hello world", "a"]
    body = {"model": "minilm", "texts": texts, "input_type": "search_query", "embedding_types": kinds}
    answer = ok(zoo.post("/v2/embed", body))
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == texts
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    for at, text in enumerate(texts):
        row = vector(zoo, text)
        found = {kind: rows[at] for kind, rows in answer["embeddings"].items()}
        np.testing.assert_allclose(found["float"], row, atol=2e-6)
        np.testing.assert_allclose(np.array(found["int8"]) / 127, row, atol=0.5 / 127 + 1e-6)
        np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
        bits = np.unpackbits(np.array(found["ubinary"], np.uint8))[: len(row)]
        np.testing.assert_array_equal(bits, row > 0)
        np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(found["base64"]), "<f4"), row, atol=2e-6)


def test_cohere_one_embeds_without_types_and_two_takes_parts(zoo: Http) -> None:
    one = ok(zoo.post("/v1/embed", {"model": "minilm", "texts": ["a"], "truncate": "START"}))
    assert one["response_type"] == "embeddings_floats"
    np.testing.assert_allclose(one["embeddings"][0], vector(zoo, "a"), atol=2e-6)
    inputs = [{"content": [{"type": "text", "text": "a"}]}]
    two = ok(zoo.post("/v2/embed", {"model": "minilm", "inputs": inputs, "output_dimension": 7}))
    np.testing.assert_allclose(two["embeddings"]["float"][0], vector(zoo, "a", dimensions=7), atol=2e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": []},
        {"texts": ["a", ""]},
        {"texts": "a"},
        {},
        {"texts": ["a"], "embedding_types": ["float8"]},
        {"texts": ["a"], "input_type": "nonsense"},
        {"texts": ["a"], "truncate": True},
        {"inputs": [{"content": [{"type": "image", "image": "x"}]}]},
    ],
    ids=str,
)
def test_cohere_refuses_by_name(zoo: Http, fields: dict[str, Any]) -> None:
    answer = zoo.post("/v2/embed", {"model": "minilm", **fields})
    assert answer.status_code == 400
    assert answer.json()["message"]


def test_a_text_too_long_is_refused_where_nothing_may_be_cut(zoo: Http) -> None:
    answer = zoo.post("/v2/embed", {"model": "minilm", "texts": ["word " * 1000], "truncate": "NONE"})
    assert answer.status_code == 400
    assert "tokens" in answer.json()["message"]


def test_ollama(zoo: Http) -> None:
    answer = ok(zoo.post("/api/embed", {"model": "minilm:latest", "input": ["a", "b"], "keep_alive": "5m"}))
    assert answer["model"] == "minilm:latest"
    np.testing.assert_allclose(answer["embeddings"], [vector(zoo, "a"), vector(zoo, "b")], atol=2e-6)
    assert answer["prompt_eval_count"] == 6
    assert answer["total_duration"] > 0
    old = np.array(ok(zoo.post("/api/embeddings", {"model": "minilm", "prompt": "a"}))["embedding"])
    np.testing.assert_allclose(old / np.linalg.norm(old), vector(zoo, "a"), atol=2e-6)
    tags = ok(zoo.get("/api/tags"))["models"]
    assert [tag["name"] for tag in tags] == ["classifier:latest", "minilm:latest", "reranker:latest", "sparse:latest"]
    assert all(tag["size"] > 0 for tag in tags)
    assert ok(zoo.get("/api/version"))["version"]
    as_curl = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = requests.post(f"{zoo.url}/api/embed", b'{"model": "minilm", "input": "a"}', headers=as_curl, timeout=20)
    np.testing.assert_allclose(ok(sent)["embeddings"][0], vector(zoo, "a"), atol=2e-6)
    nothings: tuple[Any, ...] = ("", [])
    for nothing in nothings:
        assert ok(zoo.post("/api/embed", {"model": "minilm", "input": nothing}))["embeddings"] == []
    assert ok(zoo.post("/api/show", {"model": "minilm"}))["capabilities"] == ["embedding"]
    missing = zoo.post("/api/embed", {"model": "nobody", "input": "a"})
    assert (missing.status_code, set(missing.json())) == (404, {"error"})


def test_scores_are_those_of_the_reranker_or_cosines(zoo: Http) -> None:
    ranks = {rank["index"]: rank["score"] for rank in ok(zoo.post("/rerank", {"model": "reranker", **PAIR}))}
    data = ok(zoo.post("/v1/score", {"model": "reranker", "text_1": "a", "text_2": ["b", "c"]}))["data"]
    assert [each["score"] for each in data] == pytest.approx([ranks[0], ranks[1]], abs=1e-6)
    cosine = ok(zoo.post("/score", {"model": "minilm", "text_1": ["a", "b"], "text_2": ["b", "b"]}))["data"]
    wanted = [float(vector(zoo, "a") @ vector(zoo, "b")), 1.0]
    assert [each["score"] for each in cosine] == pytest.approx(wanted, abs=1e-5)
    uneven = zoo.post("/score", {"model": "minilm", "text_1": ["a", "b"], "text_2": ["b"] * 3})
    assert uneven.status_code == 400


def test_pairs_of_many_queries_are_one_call(zoo: Http) -> None:
    """A call for each pair took a round trip for each, one after the other."""
    ones, others = [f"query {at}" for at in range(50)], [f"text {at % 7}" for at in range(50)]
    before = counted_calls(zoo)
    data = ok(zoo.post("/score", {"model": "reranker", "text_1": ones, "text_2": others}))["data"]
    assert sum(counted_calls(zoo).values()) - sum(before.values()) == 1
    wanted = [
        ok(zoo.post("/rerank", {"model": "reranker", "query": one, "texts": [other]}))[0]["score"]
        for one, other in zip(ones, others, strict=True)
    ]
    assert [each["index"] for each in data] == list(range(50))
    assert [each["score"] for each in data] == pytest.approx(wanted, abs=1e-5)


def counted_calls(zoo: Http) -> dict[str, float]:
    """Of the reranker, by method; but not the monitor's."""
    pattern = re.compile(r"tei_manager_grpc_requests_total\{([^}]*)\} (\S+)")
    found = pattern.findall(zoo.get("/metrics").text)
    return {
        labels: float(number) for labels, number in found if 'instance="reranker"' in labels and "Info" not in labels
    }


def test_one_long_text_beside_thousands_is_computed_once(zoo: Http) -> None:
    """415 kB of body took 2.4 GB, as a copy of the long text for each of the short ones."""
    gateways = zoo.running.processes_of("gateway")
    before = max(process.memory_info().rss for process in gateways)
    body = {"model": "minilm", "text_1": "a b " * 50_000, "text_2": ["x", "y"] * 1500}
    data = ok(zoo.post("/score", body))["data"]
    assert len({each["score"] for each in data}) == 2
    assert len(data) == 3000
    assert max(process.memory_info().rss for process in gateways) - before < 200e6


def test_pooling_is_the_vector(zoo: Http) -> None:
    data = ok(zoo.post("/pooling", {"model": "minilm", "input": ["a", "b"]}))["data"]
    np.testing.assert_allclose(data[1]["data"], vector(zoo, "b"), atol=2e-6)


# -- TEI's own --------------------------------------------------------------------------------------------------------


def test_the_routes_of_clouds_and_probes(zoo: Http) -> None:
    for path in ("/ping", "/", "/instances/minilm/", "/instances/minilm/ping"):
        assert zoo.get(path).status_code == 200
    assert ok(zoo.get("/api-doc/openapi.json")) == ok(zoo.get("/openapi.json"))
    np.testing.assert_allclose(
        ok(zoo.post("/instances/minilm/invocations", {"inputs": "a"}))[0], vector(zoo, "a"), atol=2e-6
    )
    page = zoo.get("/instances/minilm/metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    assert any(line.startswith("te_") and 'instance="minilm"' in line for line in page.text.splitlines())
    assert 'instance="reranker"' not in page.text
    whole = zoo.get("/metrics").text
    assert 'instance="reranker"' in whole
    for counted in ("tei_manager_grpc_requests_total", "tei_manager_queue_size", "tei_manager_http_requests_total"):
        assert f"# TYPE {counted} " in whole
        assert counted not in page.text


def test_vertex_takes_similarities_among_others(zoo: Http) -> None:
    alike: Any = {"inputs": {"source_sentence": "a", "sentences": ["a", "b"]}}
    for parts in ([alike, {"inputs": "a"}], [{"inputs": "a"}, alike]):
        found = ok(zoo.post("/instances/minilm/vertex", {"instances": parts}))["predictions"]
        for part, answer in zip(parts, found, strict=True):
            alone = ok(zoo.post("/instances/minilm/", part))
            np.testing.assert_allclose(answer, alone, atol=2e-6)
    for lacking in ({"sentences": ["a"]}, {"source_sentence": "a"}):
        refused = zoo.post("/instances/minilm/", {"inputs": lacking})
        assert (refused.status_code, "is missing" in refused.text) == (422, True)


def test_vertex_answers_each_in_its_place(zoo: Http) -> None:
    body = {"instances": [{"inputs": "a"}, {"inputs": ["b", "c"]}]}
    first, second = ok(zoo.post("/instances/minilm/vertex", body))["predictions"]
    np.testing.assert_allclose(first[0], vector(zoo, "a"), atol=2e-6)
    np.testing.assert_allclose(second[1], vector(zoo, "c"), atol=2e-6)
    many = {"instances": [{"inputs": ["a"] * 2049}, {"inputs": "b"}]}  # the first is an answer in pieces
    long, short = ok(zoo.post("/instances/minilm/vertex", many))["predictions"]
    assert (len(long), len(short)) == (2049, 1)
    refused = zoo.post("/instances/minilm/vertex", {"instances": [{"inputs": "a"}, {"inputs": ""}]})
    assert refused.status_code == 400
