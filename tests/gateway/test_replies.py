"""Answers of the multiplexer that cannot be right: refused by name in the caller's dialect, never passed on."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from appliance.wire import arrow, vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.fake_multiplexer import LIMIT_MB, Faked
from tests.gateway.test_arrow_and_limits import ARROW, ipc

GOOD = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
THREE = {"inputs": ["a", "b", "c"]}
RERANK = {"query": "q", "texts": ["a", "b", "c"]}
NAN, INFINITY = float("nan"), float("inf")


def with_number(number: float, row: int) -> np.ndarray:
    found = GOOD.copy()
    found[row, 1] = number
    return found


def dense(found: np.ndarray, row: Any = (0, 1, 2)) -> bytes:
    return mux.EmbedArrowResponse(
        arrow_ipc=arrow.dense_reply(found, np.array(row), None).to_pybytes()
    ).SerializeToString()


def sparse(*rows: list[tuple[int, float]] | None) -> bytes:
    each = [None if row is None else tuple(np.array(side) for side in zip(*row, strict=True)) for row in rows]
    return mux.EmbedSparseArrowResponse(arrow_ipc=arrow.sparse_reply(each, None).to_pybytes()).SerializeToString()


def batchless() -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([])).close()
    return mux.EmbedArrowResponse(arrow_ipc=sink.getvalue().to_pybytes()).SerializeToString()


def scores(*found: float) -> bytes:
    return tei.PredictResponse(
        predictions=[tei.Prediction(score=score, label=str(at)) for at, score in enumerate(found)]
    ).SerializeToString()


def ranks(*found: tuple[int, float]) -> bytes:
    return tei.RerankResponse(ranks=[tei.Rank(index=at, score=score) for at, score in found]).SerializeToString()


def vector(*numbers: float) -> bytes:
    return vectors.pack(np.array(numbers))


def token_rows(*rows: list[list[float]] | None) -> bytes:
    each = [None if row is None else np.array(row, np.float32) for row in rows]
    ipc = arrow.tokens_reply(each, np.zeros((0, 2), np.float32), None).to_pybytes()
    return mux.EmbedAllArrowResponse(arrow_ipc=ipc).SerializeToString()


def tokens(*lines: bytes) -> bytes:
    return b"".join(vectors.length_delimited(1, line) for line in lines)


ONE_SPARSE = tei.EmbedSparseResponse(sparse_embeddings=[tei.SparseValue(index=1, value=NAN)]).SerializeToString()
TOO_LONG = b"\x0a\x80\x80\xc0\x02" + b"a" * (LIMIT_MB + 1) * 2**20
NONSENSE = b"\x0a\xff\xff\xff\xff\xff\xff"
# path, body, RPC, its replies, what the refusal says
WRONG: dict[str, tuple[str, dict[str, Any], str, tuple[bytes, ...], str]] = {
    "NaN in a row of a batch": ("/embed", THREE, "EmbedArrowStream", (dense(with_number(NAN, 1)),), "(input 1)"),
    "infinity in a row": ("/embed", THREE, "EmbedArrowStream", (dense(with_number(-INFINITY, 2)),), "(input 2)"),
    "NaN for OpenAI": (
        "/v1/embeddings",
        {"input": ["a", "b", "c"], "encoding_format": "base64"},
        "EmbedArrowStream",
        (dense(with_number(NAN, 0)),),
        "(input 0)",
    ),
    "NaN in one vector": ("/embed", {"inputs": "a"}, "Embed", (vector(1, NAN),), "(input 0)"),
    "NaN in a sparse row": (
        "/embed_sparse",
        THREE,
        "EmbedSparseArrowStream",
        (sparse([(1, 1.0), (2, 1.0)], [(1, 1.0)], [(1, 1.0), (5, NAN)]),),
        "(input 2)",
    ),
    "NaN in one sparse vector": ("/embed_sparse", {"inputs": "a"}, "EmbedSparse", (ONE_SPARSE,), "(input 0)"),
    "NaN of a token": (
        "/embed_all",
        {"inputs": ["a", "b"]},
        "EmbedAllArrowStream",
        (token_rows([[1, 2]], [[1, 2], [3, NAN]]),),
        "(input 1)",
    ),
    "NaN as a score": (
        "/predict",
        {"inputs": [["a"], ["b"]]},
        "PredictPairStream",
        (scores(1, 0), scores(0, NAN)),
        "(input 1)",
    ),
    "NaN as a rank": ("/rerank", RERANK, "Rerank", (ranks((2, 0.5), (0, NAN), (1, 0.1)),), "(input 0)"),
    "NaN as a rank for Cohere": (
        "/v2/rerank",
        {"query": "q", "documents": ["a", "b"]},
        "Rerank",
        (ranks((1, INFINITY), (0, 1)),),
        "(input 1)",
    ),
    "NaN for a cosine": (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
        "EmbedArrowStream",
        (dense(with_number(NAN, 2)),),
        "(input 2)",
    ),
    "two ranks of one text": ("/rerank", RERANK, "Rerank", (ranks((0, 1), (1, 1), (1, 1)),), "3 ranks for 3 texts"),
    "a rank of no text": ("/rerank", RERANK, "Rerank", (ranks((0, 1), (1, 1), (7, 1)),), "3 ranks for 3 texts"),
    "an over-long answer": ("/embed", {"inputs": "a"}, "Embed", (TOO_LONG,), "grpc_max_message_size_mb"),
    "an over-long batch": ("/embed", THREE, "EmbedArrowStream", (TOO_LONG,), "grpc_max_message_size_mb"),
    "half a vector": ("/embed", {"inputs": "a"}, "Embed", (vector(1, 2)[:-3],), "cannot be read"),
    "two vectors for one": ("/embed", {"inputs": "a"}, "Embed", (vector(1, 2) * 2,), "cannot be read"),
    "no vector": ("/embed", {"inputs": "a"}, "Embed", (b"",), "cannot be read"),
    "nonsense as a vector": ("/embed", {"inputs": "a"}, "Embed", (NONSENSE,), "cannot be read"),
    "tokens of several widths": (
        "/embed_all",
        {"inputs": "a"},
        "EmbedAll",
        (tokens(vector(1, 2), vector(1, 2, 3)),),
        "cannot be read",
    ),
    "nonsense as tokens": ("/tokenize", {"inputs": "a"}, "Tokenize", (NONSENSE,), "cannot be read"),
    "nonsense as text": ("/decode", {"ids": [1]}, "Decode", (NONSENSE,), "cannot be read"),
    "nonsense as scores": ("/predict", {"inputs": "a"}, "PredictPair", (NONSENSE,), "cannot be read"),
    "nonsense as ranks": ("/rerank", RERANK, "Rerank", (NONSENSE,), "cannot be read"),
    "nonsense as a batch": ("/embed", THREE, "EmbedArrowStream", (NONSENSE,), "cannot be read"),
    "a stream without a batch": ("/embed", THREE, "EmbedArrowStream", (batchless(),), "cannot be read"),
    "sparse rows for dense ones": (
        "/embed",
        THREE,
        "EmbedArrowStream",
        (sparse([(1, 1.0)], [(1, 1.0)], [(1, 1.0)]),),
        "cannot be read",
    ),
    "too few rows": ("/embed", THREE, "EmbedArrowStream", (dense(GOOD, [0, 1]),), "2 rows came back for 3"),
    "a missing row": ("/embed", THREE, "EmbedArrowStream", (dense(GOOD, [0, -1, 1]),), "cannot be read"),
    "a missing sparse row": (
        "/embed_sparse",
        THREE,
        "EmbedSparseArrowStream",
        (sparse([(1, 1.0)], None, [(1, 1.0)]),),
        "cannot be read",
    ),
    "no answer to a batch": ("/embed", THREE, "EmbedArrowStream", (), "answered 0 of 1"),
    "two answers to a batch": ("/embed", THREE, "EmbedArrowStream", (dense(GOOD), dense(GOOD)), "more than its 1"),
    "a row without tokens' vectors": (
        "/embed_all",
        {"inputs": ["a", "b"]},
        "EmbedAllArrowStream",
        (token_rows([[1, 2]], None),),
        "cannot be read",
    ),
    "too many answers": ("/predict", {"inputs": [["a"], ["b"]]}, "PredictPairStream", (scores(1, 0),) * 3, "more than"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_right_is_refused_by_name(faked: Faked, what: str) -> None:
    path, body, name, replies, said = WRONG[what]
    faked.answer(name, *replies)
    reply = faked.post(path, body)
    assert reply.status_code == 500, reply.text
    told = reply.json()
    message = told["error"]["message"] if path.startswith("/v1/e") else told.get("error") or told["message"]
    assert said in message
    assert "Internal error" not in message


def test_what_is_right_comes_back(faked: Faked) -> None:
    faked.answer("EmbedArrowStream", dense(GOOD))
    assert faked.post("/embed", THREE).json() == GOOD.tolist()
    faked.answer("EmbedSparseArrowStream", sparse([(7, 0.5)], [(3, 1.0), (4, 2.0)], [(1, 1.0)]))
    assert faked.post("/embed_sparse", THREE).json()[1] == [{"index": 3, "value": 1.0}, {"index": 4, "value": 2.0}]
    faked.answer("Rerank", ranks((2, 0.5), (0, 0.4), (1, 0.1)))
    assert [rank["index"] for rank in faked.post("/rerank", RERANK).json()] == [2, 0, 1]


@pytest.mark.parametrize(("number", "status"), [(1.0, 200), (NAN, 500)])
def test_arrow_answers_with_null_rows_are_looked_at_as_well(faked: Faked, number: float, status: int) -> None:
    """What lies under a null row is nobody's."""
    faked.answer("EmbedArrowStream", dense(with_number(number, 2), [0, -1, 2]))
    reply = faked.post("/embed", data=ipc(["a", None, "c"]), headers=ARROW)
    assert reply.status_code == status
    assert status == 200 or "(input 2)" in reply.json()["error"]


QUERIES = {
    "dimensions=00012": "`dimensions` must be a whole number",
    "dimensions=-1": "`dimensions` must be a whole number",
    "dimensions=%2B1": "`dimensions` must be a whole number",
    "dimensions=1.0": "`dimensions` must be a whole number",
    "dimensions=1_0": "`dimensions` must be a whole number",
    "dimensions=": "`dimensions` must be a whole number",
    "dimensions=true": "`dimensions` must be a whole number",
    f"dimensions={'9' * 18}": "`dimensions` must be a whole number",
    f"dimensions={'9' * 3000}": "`dimensions` must be a whole number",
    "dimensions=%D9%A1%D9%A2": "`dimensions` must be a whole number",  # Arabic 12
    "dimensions=%C2%B2": "`dimensions` must be a whole number",  # a superscript, which is a digit for isdigit
    "dimensions=1&dimensions=2": "`dimensions` stands there 2 times",
    "normalize=1": "`normalize` must be true or false",
    "normalize=True": "`normalize` must be true or false",
    "truncate=true&truncate=false": "`truncate` stands there 2 times",
    "truncation_direction=left&truncation_direction=left": "`truncation_direction` stands there 2 times",
    "prompt_name=a&prompt_name=b": "`prompt_name` stands there 2 times",
    "model=a&model=a": "`model` stands there 2 times",
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_refused_where_json_would_be(faked: Faked, query: str) -> None:
    reply = faked.post(f"/embed?{query}", data=ipc(["a"]), headers=ARROW)
    assert reply.status_code == 422, reply.text
    assert QUERIES[query] in reply.text


def test_a_query_says_what_json_would(faked: Faked) -> None:
    asked: list[mux.EmbedArrowRequest] = []

    def answer(requests: Any, call: Any) -> Any:
        for raw in requests:
            asked.append(mux.EmbedArrowRequest.FromString(raw))
            yield dense(GOOD, [0])

    faked.multiplexer.answers["EmbedArrowStream"] = answer
    query = "dimensions=12&normalize=false&truncate=true&truncation_direction=Left&prompt_name=true&model=a"
    assert faked.post(f"/embed?{query}", data=ipc(["a"]), headers=ARROW).status_code == 200
    (found,) = asked
    assert (found.dimensions, found.normalize, found.truncate, found.prompt_name) == (12, False, True, "true")
    assert found.truncation_direction == tei.TRUNCATION_DIRECTION_LEFT


@pytest.mark.parametrize(("replacements", "status"), [(1, 200), (2, 200), (3, 503)])
def test_a_list_in_whose_midst_an_instance_was_replaced_is_asked_for_again(
    faked: Faked, replacements: int, status: int
) -> None:
    """All of it: no list has vectors of two models."""
    begun: list[int] = []

    def answer(requests: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        begun.append(0)
        number = len(begun)
        for raw in requests:
            if begun[-1] and number <= replacements:
                call.set_trailing_metadata((("x-tei-code", "REPLACED"),))
                call.abort(grpc.StatusCode.ALREADY_EXISTS, "it was replaced")
            begun[-1] += 1
            texts = pa.ipc.open_stream(mux.EmbedArrowRequest.FromString(raw).arrow_ipc).read_all().num_rows
            yield dense(np.full((texts, 2), number, np.float32), range(texts))

    faked.multiplexer.answers["EmbedArrowStream"] = answer
    long = "x" * (LIMIT_MB * 2**20 // 5)
    reply = faked.post("/embed", {"inputs": [long] * 5})
    assert reply.status_code == status, reply.text
    if status == 200:
        assert begun == [*[1] * replacements, 3]
        assert reply.json() == [[len(begun)] * 2] * 5
    else:
        assert begun == [1, 1, 1]
        assert reply.headers["Retry-After"]
