"""Token ids in the place of texts: taken or not, known or not, and said in the answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from appliance.gateway.tokenids import AddedTokens, padding_of
from appliance.wire import arrow, vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.fake_multiplexer import Faked
from testing.running import MINILM
from tests.gateway.conftest import Http

pytestmark = pytest.mark.processes

SIZE = 30522  # MiniLM's vocabulary
CLS, SEP, LETTERS = 101, 102, (1037, 1038)
INSTANCES = (
    {"name": "takes", "model_id": MINILM},
    {"name": "texts", "model_id": MINILM, "token_ids": "refuse"},
    {"name": "elsewhere", "model_id": "org/elsewhere"},
)
DENSE = mux.EmbedArrowResponse(
    arrow_ipc=arrow.dense_reply(np.ones((1, 2), np.float32), np.array([0, 0]), None).to_pybytes()
)
ROUTES = {"/embed": "inputs", "/embed_sparse": "inputs", "/embed_all": "inputs", "/v1/embeddings": "input"}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faked]:
    running = Faked(tmp_path_factory.mktemp("ids"), INSTANCES)
    replies = []
    for letter in LETTERS:
        tokens = [tei.SimpleToken(id=each, special=each != letter) for each in (CLS, letter, SEP)]
        replies.append(tei.EncodeResponse(tokens=tokens).SerializeToString())
    running.answer("TokenizeStream", *replies)
    running.answer("Decode", tei.DecodeResponse(text="a").SerializeToString())
    running.answer("Embed", vectors.pack(np.ones(2)))
    running.answer("EmbedArrowStream", DENSE.SerializeToString())
    yield running
    running.close()


def message(reply: Any) -> str:
    error = reply.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([101, SIZE, 102], f"Token id {SIZE} at place 1 is not"),
        (["a", [101, 102], [101, 102, 2**32 - 1, SIZE]], f"Token id {2**32 - 1} at place 2 of input 2 is not"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_by_its_place(ids: Faked, path: str, given: Any, place: str) -> None:
    reply = ids.post(f"/instances/takes{path}", {ROUTES[path]: given})
    assert reply.status_code == 400, reply.text
    assert place in message(reply)


@pytest.mark.parametrize("bad", [-3, 2**63, 1.5, None])
def test_the_first_entry_that_is_no_id_is_named(ids: Faked, bad: Any) -> None:
    reply = ids.post("/instances/takes/v1/embeddings", {"input": [1, 2, bad, -9]})
    assert reply.status_code == 400, reply.text
    assert f"from 0 to {2**32 - 1}, but entry 2 is" in message(reply)


def test_decode_refuses_it_as_well(ids: Faked) -> None:
    reply = ids.post("/instances/takes/decode", {"ids": [[101], [102, SIZE]]})
    assert (reply.status_code, reply.json()["error_type"]) == (400, "Validation")
    assert f"Token id {SIZE} at place 1 of input 1 is not" in message(reply)
    assert ids.post("/instances/texts/decode", {"ids": [SIZE - 1]}).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("given", [[101, 102], ["a", [101]]])
def test_an_instance_that_takes_none_says_to_send_text(ids: Faked, path: str, given: Any) -> None:
    reply = ids.post(f"/instances/texts{path}", {ROUTES[path]: given})
    assert reply.status_code == 400, reply.text
    assert "send text" in message(reply)
    assert 'token_ids = "accept"' in message(reply)


def test_a_model_of_which_one_instance_takes_none_takes_none(ids: Faked) -> None:
    """Which of them answers is chosen later."""
    assert ids.post("/embed", {"inputs": [101], "model": MINILM}).status_code == 400


@pytest.mark.parametrize(("path", "key"), [("/embed", "inputs"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize(
    ("given", "said"), [([101, 7592, 102], "decoded"), (["a", [7592]], "decoded"), (["a", "b"], None), ("a", None)]
)
def test_an_answer_from_ids_says_so(ids: Faked, path: str, key: str, given: Any, said: str | None) -> None:
    reply = ids.post(f"/instances/takes{path}", {key: given})
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("X-TEI-Token-Ids") == said


def test_what_the_engine_refuses_is_named_by_its_place_among_all_inputs(ids: Faked) -> None:
    """Where the model's files are elsewhere, only the engine knows."""

    def answer(requests: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield tei.DecodeResponse(text="a").SerializeToString()
        call.abort(grpc.StatusCode.INVALID_ARGUMENT, "Input validation error: `ids` has 7")

    ids.multiplexer.answers["DecodeStream"] = answer
    reply = ids.post("/instances/elsewhere/embed", {"inputs": [[1], "a", "b", [7]]})
    assert (reply.status_code, message(reply)) == (400, "Input validation error: `ids` has 7 (input 3)")


@pytest.mark.parametrize(
    ("ids", "own"),
    [
        ([1, 7, 2], [7]),
        ([7], [7]),
        ([1, 7, 2, 0, 0], [7]),
        ([0, 0, 1, 7, 2], [7]),
        ([1, 7, 1, 2], [7, 1]),
        ([1, 7, 0, 8, 2], [7, 0, 8]),
        ([1, 9, 7, 2], [7]),
        ([9, 7], [9, 7]),
        ([1, 2], []),
        ([0], []),
        ([7, 2, 2, 2], [7]),
        ([2, 2, 1, 7, 2], [7]),
    ],
)
def test_only_what_the_tokenizer_sets_around_a_text_is_taken_off(ids: list[int], own: list[int]) -> None:
    """9 is a marker behind the first token, and 0 fills up, as the last token of each text may as well."""
    assert AddedTokens([[1, 9], [1]], [[2], [2]], frozenset({0, 2})).without(ids) == own


def test_a_tokenizer_that_adds_nothing_takes_nothing_off() -> None:
    assert AddedTokens([[], []], [[], []], frozenset()).without([1, 2]) == [1, 2]


SPECIAL = {"[PAD]": 0, "</s>": 2}


@pytest.mark.parametrize(
    ("tokenizer", "config", "padding"),
    [
        ({}, {}, 0),
        ({}, {"pad_token_id": 2}, 2),
        ({}, {"pad_token_id": 5}, 0),  # a token of texts
        ({"pad_token": "</s>"}, {"pad_token_id": 0}, 2),
        ({"pad_token": {"content": "</s>"}}, {}, 2),
        ({"pad_token": "!"}, {"pad_token_id": None}, 0),
        ([], 7, 0),
    ],
)
def test_the_token_that_fills_up_is_found(tmp_path: Path, tokenizer: Any, config: Any, padding: int) -> None:
    assert padding_of(tmp_path, SPECIAL) == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert padding_of(tmp_path, SPECIAL) == padding
    assert padding_of(tmp_path, {}) is None


@pytest.mark.parametrize(
    "text",
    ["hello world", "the [MASK] sat", "[MASK]", "\N{CRAB}", "a \N{CRAB} and [UNK] [SEP] more", "between [PAD] both"],
)
@pytest.mark.parametrize(("before", "behind"), [([CLS], [SEP]), ([], []), ([CLS], [SEP, 0, 0, 0])])
def test_ids_have_the_vector_of_their_text(zoo: Http, text: str, before: list[int], behind: list[int]) -> None:
    """Special tokens within a text belong to it; those around it may be sent or not, and padding as well."""
    (tokens,) = zoo.post("/instances/minilm/tokenize", {"inputs": text}).json()
    ids = [*before, *(token["id"] for token in tokens[1:-1]), *behind]
    same, others = (zoo.post("/instances/minilm/embed", {"inputs": [text, each]}).json() for each in (ids, [CLS, 7592]))
    np.testing.assert_allclose(same[0], same[1], atol=1e-6)
    assert not np.allclose(others[0], others[1], atol=1e-2)
