"""What official clients send when nobody has set it, and fields that would change an answer: read or refused."""

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import lz4.frame
import pyarrow as pa
import pytest
import requests

from appliance.gateway.cards import Cards
from appliance.gateway.image_inputs import mixed
from appliance.gateway.refusals import Refusal
from appliance.gateway.slices import arrow_of, cut, of_token_vectors
from testing.running import eventually
from tests.gateway.conftest import Http
from tests.gateway.test_arrow_and_limits import ARROW, ipc, rows

LONG = "word " * 200  # the reranker takes 64 tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "minilm", "input": "a", "dimensions": 0}),  # infinity
        ("/v1/embeddings", {"model": "minilm", "input": "a", "return_multivector": False, "modality": "text"}),
        ("/v2/embed", {"model": "minilm", "texts": ["a"], "images": None, "input_type": "search_query"}),  # cohere
        ("/rerank", {"model": "reranker", "query": "a", "texts": None, "documents": ["b"]}),
        ("/score", {"model": "reranker", "text_1": None, "queries": "a", "text_2": None, "documents": ["b"]}),
        ("/search-rerank", {"model": "reranker", "query": "a", "candidates": ["b"], "dense": None, "rerank": True}),
        ("/hybrid", {"model": "minilm", "inputs": "a", "sparse": None, "dense": None, "tokens": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_not_set_is_not_there(zoo: Http, path: str, body: dict[str, Any]) -> None:
    answer = zoo.post(path, body)
    assert answer.status_code == 200, answer.text


def test_strings_are_images_where_the_client_says_so(zoo: Http) -> None:
    """They were embedded as the text of their URL."""
    body = {"input": ["data:image/png;base64,AAAA"], "modality": "image"}
    assert mixed(body, "input").images == {0: "data:image/png;base64,AAAA"}
    refused = zoo.post("/v1/embeddings", {"model": "minilm", **body})
    assert (refused.status_code, "takes no images" in refused.text) == (400, True)
    with pytest.raises(Refusal, match="modality"):
        mixed({"input": "a", "modality": "audio"}, "input")


def test_an_image_and_a_text_are_two_inputs() -> None:
    with pytest.raises(Refusal, match="an image and a text in one input"):
        mixed({"input": [{"image": "AAAA", "text": "a"}]}, "input")


def test_a_vector_of_each_token_is_asked_for_elsewhere(zoo: Http) -> None:
    refused = zoo.post("/v1/embeddings", {"model": "minilm", "input": "a", "return_multivector": True})
    assert (refused.status_code, "/embed_all" in refused.text) == (400, True)


@pytest.mark.parametrize("field", [{"truncation": False}, {"truncate": False}, {"truncate": "NONE"}], ids=str)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_document_that_is_too_long_is_refused_where_nothing_may_be_cut(
    zoo: Http, path: str, field: dict[str, Any]
) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["short", LONG]}
    assert zoo.post(path, body).status_code == 200
    refused = zoo.post(path, {**body, **field})
    assert (400 <= refused.status_code < 500, "tokens" in refused.text) == (True, True), refused.text


@pytest.mark.parametrize("queries", [["a"], ["a", "b"]], ids=["one", "many"])
def test_a_classifier_scores_no_pairs(zoo: Http, queries: list[str]) -> None:
    """The probability of its likeliest label was the score of a pair."""
    refused = zoo.post("/score", {"model": "classifier", "text_1": queries, "text_2": ["c", "d"][: len(queries)]})
    assert refused.status_code == 400, refused.text


def test_models_are_found_where_clients_look(zoo: Http) -> None:
    for path in ("/openai/models/minilm", "/openai/v1/models/minilm"):
        assert zoo.get(path).json()["id"] == "minilm"


@pytest.mark.parametrize(
    "body",
    [
        ipc(["a", "b"]) + ipc(["c"]),
        lz4.frame.compress(ipc(["a", "b"])) + lz4.frame.compress(ipc(["c"])),
        lz4.frame.compress(ipc(["a", "b"]), store_size=False) + b"more",
        lz4.frame.compress(ipc(["a", "b"]), store_size=False)[:-4],
        ipc(["a", "b"]) + b"more",
    ],
    ids=["two streams", "two frames", "more behind a frame", "half a frame", "more behind a stream"],
)
def test_what_follows_an_arrow_stream_is_refused(zoo: Http, body: bytes) -> None:
    """It was dropped, and the answer had fewer rows than were sent."""
    refused = zoo.post("/instances/minilm/embed", data=body, headers=ARROW)
    assert refused.status_code == 400, refused.text


def test_an_open_arrow_stream_is_whole(zoo: Http) -> None:
    """Its end may be that of the body."""
    sink = io.BytesIO()
    writer = pa.ipc.new_stream(sink, pa.schema([("text", pa.string())]))
    writer.write_batch(pa.record_batch([pa.array(["a", "b"])], names=["text"]))
    answer = zoo.post("/instances/minilm/embed", data=sink.getvalue(), headers=ARROW)
    assert rows(answer.content).num_rows == 2


def test_slices_of_token_vectors_fit_into_a_message() -> None:
    texts = ["word " * 100] * 50 + ["a"] * 50
    parts = list(cut(arrow_of(texts), 4 * 2**20, of_token_vectors(None)))
    assert [text for part in parts for text in part.to_pylist()] == texts
    # 512 tokens of 1,024 numbers each are 2 MiB, and 17 are 68 kB.
    assert [len(part) for part in parts[:49]] == [1] * 49
    assert len(parts) == 51


def test_vectors_of_tokens_as_arrow_may_be_more_than_one_message(zoo: Http) -> None:
    """They were computed and then refused: 42 MB do not fit into one."""
    answer = zoo.post("/instances/minilm/embed_all", data=ipc(["word " * 100] * 300), headers=ARROW)
    assert answer.status_code == 200, answer.text
    assert rows(answer.content).num_rows == 300


def test_vertex_stops_when_its_client_has_left(zoo: Http) -> None:
    before = embedded(zoo)
    body = {"instances": [{"inputs": f"{at} {LONG}"} for at in range(5000)]}

    with pytest.raises(requests.Timeout):
        requests.post(f"{zoo.url}/instances/minilm/vertex", json=body, timeout=2)
    assert embedded(zoo) > before
    eventually(lambda: is_quiet(zoo), 20)


def embedded(zoo: Http) -> float:
    """Calls of minilm's Embed so far."""
    found = re.findall(r"tei_manager_grpc_requests_total\{([^}]*)\} (\S+)", zoo.get("/metrics").text)
    own = [number for labels, number in found if 'instance="minilm"' in labels and 'method="Embed"' in labels]
    return sum(map(float, own))


def is_quiet(zoo: Http) -> bool:
    before = embedded(zoo)
    time.sleep(1)  # not for a condition: within it, a dozen texts are computed
    return embedded(zoo) == before


def test_a_prompt_has_the_spelling_of_its_model() -> None:
    card = SimpleNamespace(prompts={"Clustering": "task: clustering | query: ", "STS": "x", "query": "y"})
    cards: Any = Cards.__new__(Cards)
    cards.of = lambda instance: card
    assert Cards.prompt_name(cards, None, ("clustering", "separation")) == "Clustering"  # type: ignore[arg-type]
    assert Cards.prompt_name(cards, None, ("text-matching", "sts")) == "STS"  # type: ignore[arg-type]
    assert Cards.prompt_name(cards, None, ("search_query", "query")) == "query"  # type: ignore[arg-type]
    assert Cards.prompt_name(cards, None, ("classification",)) is None  # type: ignore[arg-type]
