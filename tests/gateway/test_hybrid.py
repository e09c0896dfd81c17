"""`/hybrid` and `/search-rerank` on real instances: the same numbers as the routes of one kind, in one call."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from testing.engines import FAMILIES, HEADS
from testing.running import RunningAppliance
from tests.gateway.conftest import Http

pytestmark = pytest.mark.processes

MODELS: dict[str, dict[str, Any]] = {
    "m3": {"model_id": str(HEADS / "bge-m3")},
    "splade": {
        "model_id": str(FAMILIES / "bert-splade"),
        "pooling": "splade",
        "extra_args": ["--auto-truncate", "false"],
    },
    "colbert": {"model_id": str(HEADS / "colbert")},
    "judge": {"model_id": str(FAMILIES / "bert-rerank")},
}
TEXT = "rain over the harbour"
TEXTS = ["the harbour is closed", "a sunny day", "it rains", "SELECT name FROM users"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    with RunningAppliance(tmp_path_factory.mktemp("hybrid"), seeds="") as appliance:
        for name, fields in MODELS.items():
            appliance.create(name, **fields)
        for name in MODELS:
            appliance.wait_ready(name)
        yield Http(appliance)


def ok(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def dense(http: Http, texts: list[str]) -> np.ndarray:
    return np.array(ok(http.post("/instances/m3/embed", {"inputs": texts})))


def sparse(http: Http, name: str, texts: list[str]) -> list[dict[int, float]]:
    found = ok(http.post(f"/instances/{name}/embed_sparse", {"inputs": texts}))
    return [{entry["index"]: entry["value"] for entry in row} for row in found]


def tokens(http: Http, texts: list[str], role: str) -> list[np.ndarray]:
    found = ok(http.post("/instances/colbert/embed_all", {"inputs": texts, "prompt_name": role}))
    return [np.array(rows) for rows in found]


# -- /hybrid ----------------------------------------------------------------------------------------------------------


def test_no_kind_of_vectors_is_of_a_part_of_the_text_where_its_instance_cuts_none_unasked(http: Http) -> None:
    """That of the first kind decided for all."""
    body = {"inputs": "rain " * 2000, "dense": {"model": "m3"}, "sparse": {"model": "splade"}}
    refused = http.post("/hybrid", body)
    assert (refused.status_code, "tokens. Given: " in refused.text or "characters. Given: " in refused.text) == (
        422,
        True,
    )
    assert ok(http.post("/hybrid", {**body, "truncate": True}))["instances"] == {"dense": "m3", "sparse": "splade"}


def test_a_model_named_gives_all_that_it_has_in_one_pass(http: Http) -> None:
    answer = http.post("/hybrid", {"inputs": TEXT, "model": "m3"})
    found = ok(answer)
    assert (found["passes"], found["instances"]) == (1, dict.fromkeys(("dense", "sparse", "tokens"), "m3"))
    np.testing.assert_allclose(found["dense"], dense(http, [TEXT])[0], atol=1e-6)
    entries = {entry["index"]: entry["value"] for entry in found["sparse"]}
    assert entries == pytest.approx(sparse(http, "m3", [TEXT])[0], abs=1e-6)
    rows = ok(http.post("/instances/m3/embed_all", {"inputs": TEXT}))[0]
    np.testing.assert_allclose(found["tokens"], rows, atol=1e-6)
    assert answer.headers["X-TEI-Instance"] == "m3"
    assert int(answer.headers["X-Compute-Tokens"]) > 0


def test_each_kind_may_come_of_another_instance(http: Http) -> None:
    body = {
        "inputs": TEXT,
        "dense": {"model": "m3", "dimensions": 8},
        "sparse": {"model": "splade"},
        "tokens": {"model": "colbert", "prompt_name": "query"},
    }
    found = ok(http.post("/hybrid", body))
    assert found["instances"] == {"dense": "m3", "sparse": "splade", "tokens": "colbert"}
    assert len(found["dense"]) == 8
    np.testing.assert_allclose(found["tokens"], tokens(http, [TEXT], "query")[0], atol=1e-6)


def test_without_a_name_the_only_instance_for_a_kind_answers(http: Http) -> None:
    assert ok(http.post("/hybrid", {"inputs": TEXT, "dense": True}))["instances"] == {"dense": "m3"}
    assert "Say which model" in http.post("/hybrid", {"inputs": TEXT, "sparse": True}).text  # m3 and splade


def test_a_leg_that_fails_fails_all_or_is_told(http: Http) -> None:
    body = {"inputs": TEXT, "dense": {"model": "m3"}, "sparse": {"model": "colbert"}}
    whole = http.post("/hybrid", body)
    assert (whole.status_code, whole.json()["error_type"]) == (424, "Backend")
    found = ok(http.post("/hybrid", {**body, "on_error": "partial"}))
    assert len(found["dense"]) == 32
    assert "sparse" not in found
    assert found["errors"]["sparse"]["code"] == "FAILED_PRECONDITION"
    assert "multivector" in found["errors"]["sparse"]["message"]


def test_a_leg_whose_model_there_is_not_fails_all_or_is_told(http: Http) -> None:
    body = {"inputs": TEXT, "dense": {"model": "m3"}, "sparse": {"model": "nobody"}}
    assert http.post("/hybrid", body).status_code == 404
    found = ok(http.post("/hybrid", {**body, "on_error": "partial"}))
    assert len(found["dense"]) == 32
    assert found["errors"]["sparse"]["code"] == "NOT_FOUND"
    assert "nobody" in found["errors"]["sparse"]["message"]
    assert http.post("/hybrid", {**body, "dense": False, "on_error": "partial"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "`inputs` is missing"),
        ({"inputs": ["a"]}, 422, "must be a string"),
        ({"inputs": ""}, 400, "cannot be empty"),
        ({"inputs": "a", "dense": 1}, 422, "`dense` must be true, false or an object"),
        ({"inputs": "a", "dense": {"dimensions": "x"}}, 422, "`dimensions` must"),
        ({"inputs": "a", "dense": False}, 422, "Nothing is asked for"),
        ({"inputs": "a", "on_error": "ignore"}, 422, "`on_error` must"),
        ({"inputs": "a", "model": "nobody"}, 404, "no model or instance"),
        ({"inputs": "a", "model": "m3", "dense": {"dimensions": 1000}}, 422, "between 1 and 32"),
    ],
)
def test_hybrid_refuses_by_name(http: Http, body: Any, status: int, words: str) -> None:
    answer = http.post("/hybrid", body)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


# -- /search-rerank ---------------------------------------------------------------------------------------------------


def ranks(scores: Any) -> list[int]:
    order = sorted(range(len(scores)), key=lambda at: -scores[at])
    return [order.index(at) + 1 for at in range(len(scores))]


def scores_alone(http: Http) -> dict[str, list[float]]:
    """What each kind says of the texts, of the routes of one kind."""
    of_query, vectors = dense(http, [TEXT])[0], dense(http, TEXTS)
    weights, others = sparse(http, "splade", [TEXT])[0], sparse(http, "splade", TEXTS)
    (query,), documents = tokens(http, [TEXT], "query"), tokens(http, TEXTS, "document")
    return {
        "dense": [float(vector @ of_query) for vector in vectors],
        "sparse": [sum(weights.get(index, 0) * value for index, value in each.items()) for each in others],
        "tokens": [float((query @ document.T).max(axis=1).sum()) for document in documents],
    }


LEGS = {"dense": {"model": "m3"}, "sparse": {"model": "splade"}, "tokens": {"model": "colbert"}}


def test_several_scores_become_one_order_with_all_parts(http: Http) -> None:
    alone = scores_alone(http)
    found = ok(http.post("/search-rerank", {"query": TEXT, "candidates": TEXTS, "return_text": True, **LEGS}))
    assert found["instances"] == {"dense": "m3", "sparse": "splade", "tokens": "colbert"}
    fused = [sum(1 / (60 + ranks(each)[at]) for each in alone.values()) for at in range(len(TEXTS))]
    results = found["results"]
    assert [each["index"] for each in results] == sorted(range(len(TEXTS)), key=lambda at: -fused[at])
    for each in results:
        at = each["index"]
        assert each["text"] == TEXTS[at]
        assert each["score"] == pytest.approx(fused[at])
        for name, scores in alone.items():
            assert each["parts"][name]["score"] == pytest.approx(scores[at], abs=1e-4)
            assert each["parts"][name]["rank"] == ranks(scores)[at]


def test_the_headers_count_all_texts(http: Http) -> None:
    answer = http.post("/search-rerank", {"query": TEXT, "candidates": TEXTS, **LEGS})
    alone = http.post("/instances/m3/embed", {"inputs": [TEXT, *TEXTS]})
    assert int(answer.headers["X-Compute-Tokens"]) > 2 * int(alone.headers["X-Compute-Tokens"])
    assert answer.headers["X-TEI-Instance"] == "m3, splade, colbert"


def test_weighted_sums_are_of_scores_between_0_and_1(http: Http) -> None:
    alone = scores_alone(http)
    body = {"query": TEXT, "candidates": TEXTS, "fusion": "weighted", "weights": {"tokens": 0, "dense": 2}, **LEGS}
    for each in ok(http.post("/search-rerank", body))["results"]:
        wanted = 0.0
        for name, weight in (("dense", 2), ("sparse", 1)):
            low, high = min(alone[name]), max(alone[name])
            wanted += weight * (alone[name][each["index"]] - low) / (high - low)
        assert each["score"] == pytest.approx(wanted, abs=2e-3)  # their range is small


def test_the_best_are_reranked_and_the_others_stay_behind(http: Http) -> None:
    body = {"query": TEXT, "candidates": TEXTS, "dense": LEGS["dense"]}
    first = [each["index"] for each in ok(http.post("/search-rerank", body))["results"]]
    found = ok(http.post("/search-rerank", {**body, "rerank": {"model": "judge", "top": 2}}))["results"]
    ranked = ok(http.post("/instances/judge/rerank", {"query": TEXT, "texts": [TEXTS[at] for at in first[:2]]}))
    assert [each["index"] for each in found] == [*(first[rank["index"]] for rank in ranked), *first[2:]]
    assert [each["score"] for each in found[:2]] == pytest.approx([rank["score"] for rank in ranked], abs=1e-5)
    assert ["rerank" in each["parts"] for each in found] == [True, True, False, False]


def test_reranking_alone_needs_no_vectors(http: Http) -> None:
    body = {"query": TEXT, "candidates": TEXTS, "rerank": {"model": "colbert"}, "top_n": 3}
    found = ok(http.post("/search-rerank", body))["results"]
    sums = scores_alone(http)["tokens"]
    length = len(tokens(http, [TEXT], "query")[0])
    assert [each["index"] for each in found] == sorted(range(len(TEXTS)), key=lambda at: -sums[at])[:3]
    assert found[0]["score"] == pytest.approx(max(sums) / length, abs=1e-4)


def test_stored_vectors_are_used_instead_of_computed_ones(http: Http) -> None:
    vectors, entries, rows = dense(http, TEXTS), sparse(http, "splade", TEXTS), tokens(http, TEXTS, "document")
    stored = [
        {
            "dense": list(vector),
            "sparse": [{"index": index, "value": value} for index, value in each.items()],
            "tokens": each_rows.tolist(),
        }
        for vector, each, each_rows in zip(vectors, entries, rows, strict=True)
    ]
    mixed = [*stored[:3], TEXTS[3]]
    computed = ok(http.post("/search-rerank", {"query": TEXT, "candidates": TEXTS, **LEGS}))["results"]
    for candidates in (stored, mixed):
        found = ok(http.post("/search-rerank", {"query": TEXT, "candidates": candidates, **LEGS}))["results"]
        assert [each["index"] for each in found] == [each["index"] for each in computed]
        for each, other in zip(found, computed, strict=True):
            for name in LEGS:
                assert each["parts"][name]["score"] == pytest.approx(other["parts"][name]["score"], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"candidates": ["a"]}, 422, "`query` is missing"),
        ({"query": "", "candidates": ["a"]}, 400, "`query` cannot be empty"),
        ({"query": "a"}, 422, "`candidates` must be a list of 1 to 1000"),
        ({"query": "a", "candidates": []}, 422, "`candidates` must be a list of 1 to 1000"),
        ({"query": "a", "candidates": [1]}, 422, "entry 0 is neither"),
        ({"query": "a", "candidates": [{"text": 7}]}, 422, "entry 0 is neither"),
        ({"query": "a", "candidates": [{"dense": ["1.0"]}]}, 422, "entry 0 that cannot be read"),
        ({"query": "a", "candidates": [{"dense": [True]}]}, 422, "true is no number"),
        ({"query": "a", "candidates": [{"dense": {"0": 1}}]}, 422, "a list of numbers is needed"),
        ({"query": "a", "candidates": [{"dense": [1e39]}]}, 422, "numbers that are finite"),
        ({"query": "a", "candidates": [{"dense": [10**300]}]}, 422, "numbers that are finite"),
        ({"query": "a", "candidates": [{"tokens": [1.0]}]}, 422, "a list of lists of numbers is needed"),
        ({"query": "a", "candidates": [{"sparse": {"index": 1}}]}, 422, "objects with index and value"),
        ({"query": "a", "candidates": [{"sparse": [{"index": 1}]}]}, 422, "objects with index and value"),
        ({"query": "a", "candidates": [{"sparse": [{"index": 1, "value": "1"}]}]}, 422, "is no number"),
        ({"query": "a", "candidates": [{"tokens": [[1], [2, 3]]}]}, 422, "entry 0 that cannot be read"),
        ({"query": "a", "candidates": [{"sparse": [{"index": -1, "value": 1}]}]}, 422, "that cannot be read"),
        ({"query": "a", "candidates": ["b", {"dense": [1.0]}], "dense": {"model": "m3"}}, 422, "vectors of 1 numbers"),
        ({"query": "a", "candidates": [{"dense": [1.0]}], "sparse": {"model": "splade"}}, 422, "entry 0 has no text"),
        ({"query": "a", "candidates": [{"dense": [3e38] * 32}], "dense": {"model": "m3"}}, 422, "not a finite number"),
        ({"query": "a", "candidates": ["b"], "fusion": "sum"}, 422, "`fusion` must"),
        ({"query": "a", "candidates": ["b"], "weights": {"colour": 1}}, 422, "dense, sparse, tokens are known"),
        ({"query": "a", "candidates": ["b"], "weights": {"dense": -1}}, 422, "`dense` must"),
        ({"query": "a", "candidates": ["b"], "rerank": "yes"}, 422, "`rerank` must be true, false or an object"),
        ({"query": "a", "candidates": ["b"], "rerank": {"top": 0}}, 422, "`top` must"),
        ({"query": "a", "candidates": ["b"], "model": "nobody"}, 404, "no model or instance"),
    ],
)
def test_search_rerank_refuses_by_name(http: Http, body: Any, status: int, words: str) -> None:
    answer = http.post("/search-rerank", body)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
