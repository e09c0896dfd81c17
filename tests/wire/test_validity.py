"""What cannot be right is found in every kind of reply, and what is right passes."""

import math
import struct
from typing import Any

import numpy as np
import pytest

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest, EmbedHybridResponse
from appliance.wire.validity import RIGHT, count_finite, inspect, vector_flaw
from appliance.wire.vectors import length_delimited, pack

UNIT = np.full(4, 0.5, np.float32)
LARGEST = float(np.finfo(np.float32).max)
METADATA = tei.Metadata(compute_tokens=3)
ASKED = tei.EmbedRequest(inputs="x", normalize=True)


def embed(vector: Any) -> bytes:
    return tei.EmbedResponse(embeddings=vector, metadata=METADATA).SerializeToString()


def tokens(*table: Any) -> bytes:
    return b"".join(length_delimited(1, pack(np.array(row, np.float32))) for row in table)


def sparse(*values: float) -> bytes:
    entries = [tei.SparseValue(index=at, value=value) for at, value in enumerate(values)]
    return tei.EmbedSparseResponse(sparse_embeddings=entries).SerializeToString()


def of_one_pass(dense: Any, value: float, *rows: Any) -> bytes:
    answer = EmbedHybridResponse(embeddings=dense, metadata=METADATA)
    answer.sparse_embeddings.add(index=7, value=value)
    for row in rows:
        answer.token_embeddings.add(embeddings=row)
    return answer.SerializeToString()


def predictions(*scores: float) -> bytes:
    return tei.PredictResponse(predictions=[tei.Prediction(score=score) for score in scores]).SerializeToString()


def ranks(*indices: int, score: float = 0.5) -> bytes:
    return tei.RerankResponse(ranks=[tei.Rank(index=at, score=score) for at in indices]).SerializeToString()


HYBRID = EmbedHybridRequest(inputs="x", normalize=True, dense=True, sparse=True, tokens=True)
METADATA_ALONE = length_delimited(4, METADATA.SerializeToString())
RERANK = tei.RerankRequest(query="q", texts=["a", "b"])
RIGHT_REPLIES = [
    ("Embed", ASKED, embed(UNIT)),
    ("Embed", tei.EmbedRequest(inputs="x"), embed([3, 4])),
    ("Embed", tei.EmbedRequest(inputs="x", normalize=False), embed([0, 0])),
    ("Embed", ASKED, embed(UNIT * 1.01)),
    ("EmbedAll", tei.EmbedAllRequest(inputs="x"), tokens([1, 2], [3, 4])),
    ("EmbedSparse", tei.EmbedSparseRequest(inputs="x"), sparse(0.5, 1)),
    ("EmbedSparse", tei.EmbedSparseRequest(inputs="x"), sparse()),
    ("EmbedSparse", tei.EmbedSparseRequest(inputs="x"), sparse(*[LARGEST] * 100)),
    ("EmbedHybrid", HYBRID, of_one_pass(UNIT, 0.5, [1, 2], [3, 4])),
    ("EmbedHybrid", HYBRID, of_one_pass(UNIT, 0.5, [1, 2], [3, 4]) + length_delimited(9, b"of another version")),
    ("EmbedHybrid", HYBRID, METADATA_ALONE),
    ("EmbedHybrid", EmbedHybridRequest(inputs="x"), of_one_pass([3, 4], 0.5)),
    ("Predict", tei.PredictRequest(inputs="x"), predictions(0.1, 0.9)),
    ("Rerank", RERANK, ranks(1, 0)),
    ("Tokenize", tei.EncodeRequest(inputs="x"), b"anything"),
]
FLAWED = [
    ("Embed", ASKED, embed([0, 0]), "length 0"),
    ("Embed", ASKED, embed([3, 4]), "length 5"),
    ("Embed", ASKED, embed([1, math.nan]), "number 1 of its vector is nan"),
    ("Embed", ASKED, embed([math.inf, 1]), "number 0 of its vector is inf"),
    ("Embed", ASKED, embed([]), "cannot be read"),
    ("Embed", ASKED, b"\x0a\xff\xff\xff\xff\x0f", "cannot be read"),
    ("EmbedAll", tei.EmbedAllRequest(inputs="x"), tokens([1, 2], [math.nan, 4]), "not finite"),
    ("EmbedSparse", tei.EmbedSparseRequest(inputs="x"), sparse(0.5, math.inf), "inf"),
    ("EmbedSparse", tei.EmbedSparseRequest(inputs="x"), sparse(math.inf, -math.inf), "inf"),
    ("EmbedHybrid", HYBRID, of_one_pass([3, 4], 0.5), "length 5"),
    ("EmbedHybrid", HYBRID, of_one_pass([1, math.nan], 0.5, [1, 2]), "number 1 of its vector is nan"),
    ("EmbedHybrid", HYBRID, of_one_pass(UNIT, math.inf, [1, 2]), "a number of it is inf"),
    ("EmbedHybrid", HYBRID, of_one_pass(UNIT, 0.5, [1, 2], [math.nan, 1]), "not finite"),
    ("EmbedHybrid", HYBRID, of_one_pass(UNIT, 0.5)[:-1], "cannot be read"),
    ("Predict", tei.PredictRequest(inputs="x"), predictions(math.nan), "nan"),
    ("PredictPair", tei.PredictPairRequest(), b"\xff", "cannot be read"),
    ("Rerank", RERANK, ranks(0), "ranks 1 texts, and 2 were sent"),
    ("Rerank", RERANK, ranks(0, 0), "ranks 2 texts, and 2 were sent"),
    ("Rerank", RERANK, ranks(0, 1, score=math.nan), "nan"),
]


@pytest.mark.parametrize(("method", "request_", "reply"), RIGHT_REPLIES)
def test_what_is_right_passes(method: str, request_: Any, reply: bytes) -> None:
    assert inspect(method, request_.SerializeToString(), reply).flaw is None


@pytest.mark.parametrize(("method", "request_", "reply", "words"), FLAWED)
def test_what_cannot_be_right_has_its_reason(method: str, request_: Any, reply: bytes, words: str) -> None:
    fault = inspect(method, request_.SerializeToString(), reply).flaw
    assert fault is not None
    assert words in fault


def entry(*fields: bytes) -> bytes:
    return length_delimited(1, b"".join(fields))


def value(number: float) -> bytes:
    return b"\x15" + struct.pack("<f", number)


def test_sparse_values_are_seen_to_be_finite_or_read_whatever_their_encoder_does() -> None:
    index, metadata = b"\x08\x95\x95\x01", length_delimited(2, METADATA.SerializeToString())
    entries = {
        "as usual": entry(index, value(0.5)),
        "the first index": entry(value(1.5)),
        "nothing": entry(index),
        "nothing at all": entry(),
        "the other way round": entry(value(2.5), index),
        "with a field of another version": entry(index, value(3.5), length_delimited(7, bytes(200))),
    }
    for name, one in entries.items():
        assert inspect("EmbedSparse", b"", one * 3 + metadata).flaw is None, name
        for number in (math.nan, math.inf, -math.inf):
            for wrong in (entry(index, value(number)), entry(value(number), index)):
                for reply in (one + wrong + metadata, wrong + one, metadata + one + wrong):
                    assert inspect("EmbedSparse", b"", reply).flaw == f"a number of it is {number}", name
    usual = entries["as usual"]
    assert [count_finite(usual * 3 + metadata), count_finite(usual[:-1]), count_finite(metadata + usual)] == [3, 0, 0]
    assert "cannot be read" in str(inspect("EmbedSparse", b"", usual[:-1]).flaw)


@pytest.mark.parametrize(
    ("method", "request_", "reply", "width"),
    [
        ("Embed", ASKED, embed(UNIT), 4),
        ("Embed", tei.EmbedRequest(inputs="x", dimensions=4), embed(UNIT), None),
        ("Embed", b"\xff", embed(UNIT), None),
        ("EmbedAll", tei.EmbedAllRequest(inputs="x"), tokens([1, 2]), None),
        ("Tokenize", tei.EncodeRequest(inputs="x"), b"anything", None),
    ],
)
def test_the_width_is_the_models_where_no_other_was_asked_for(
    method: str, request_: Any, reply: bytes, width: int | None
) -> None:
    asked = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    assert inspect(method, asked, reply) == RIGHT._replace(width=width)


def test_large_numbers_are_finite() -> None:
    with np.errstate(over="ignore"):
        assert vector_flaw(np.array([1e30, -1e30], np.float32), normalized=False) is None
        assert inspect("EmbedAll", b"", tokens([1, 2], [-LARGEST, 4])).flaw is None
        assert "not finite" in str(inspect("EmbedAll", b"", tokens([1, math.nan], [-LARGEST, 4])).flaw)


def test_a_vector_whose_square_is_no_float_is_not_normalised() -> None:
    with np.errstate(over="ignore"):
        assert "a normalised one was asked for" in str(vector_flaw(np.full(8, 1e20, np.float32), normalized=True))
