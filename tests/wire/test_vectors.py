"""Packed vectors: the bytes that protobuf itself would write, whatever array they come from."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridResponse
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.specs import LAW

FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=200)


def by_protobuf(values: np.ndarray) -> bytes:
    return tei.EmbedResponse(embeddings=values.astype(np.float32).tolist()).SerializeToString()


@LAW
@given(FLOATS)
def test_a_packed_vector_is_protobuf_s(values: list[float]) -> None:
    vector = np.array(values, np.float32)
    assert vectors.pack(vector) == by_protobuf(vector)
    assert vectors.pack(vector) == tei.TokenEmbedding(embeddings=values).SerializeToString()


@pytest.mark.parametrize("width", [0, 1, 31, 32, 127, 128, 384, 4095, 4096, 70_000])
def test_every_width_has_the_right_length_in_front(width: int) -> None:
    vector = np.linspace(-1, 1, width, dtype=np.float32)
    assert vectors.pack(vector) == by_protobuf(vector)


def test_what_is_no_number_survives_too() -> None:
    vector = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    assert vectors.pack(vector) == by_protobuf(vector)
    assert np.array(tei.EmbedResponse.FromString(vectors.pack(vector)).embeddings, "<f4").tobytes() == vector.tobytes()


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "<i4"])
def test_any_array_is_packed_as_little_endian_float32(kind: str) -> None:
    vector = np.arange(20).astype(kind)
    assert vectors.pack(vector) == by_protobuf(vector)
    assert vectors.pack(vector[::-2]) == by_protobuf(vector[::-2])


@LAW
@given(st.integers(0, 2**63), st.binary(max_size=300))
def test_varints_and_lengths_are_protobuf_s(number: int, content: bytes) -> None:
    timed = tei.Metadata(total_time_ns=number).SerializeToString()
    assert timed == (b"\x18" + vectors.varint(number) if number else b"")
    assert tei.EmbedRequest.FromString(vectors.length_delimited(99, content)) is not None
    assert vectors.length_delimited(5, content).endswith(vectors.varint(len(content)) + content)


ENTRIES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False)), max_size=50)


@LAW
@given(FLOATS, ENTRIES, st.lists(FLOATS, max_size=5), st.integers(0, 2**64 - 1), st.integers(0, 2**16))
def test_fields_under_other_numbers_are_those_of_the_other_message(
    dense: list[float], sparse: list[tuple[int, float]], tokens: list[list[float]], nanoseconds: int, cut: int
) -> None:
    fields: dict[str, Any] = {
        "embeddings": dense,
        "sparse_embeddings": [tei.SparseValue(index=index, value=value) for index, value in sparse],
        "token_embeddings": [tei.TokenEmbedding(embeddings=row) for row in tokens],
        "metadata": tei.Metadata(total_time_ns=nanoseconds),
    }
    raw = EmbedHybridResponse(**fields).SerializeToString()
    theirs = {name: number for number, name in enumerate(fields, start=1)}
    ours = {name: field.number for name, field in mux.HybridResult.DESCRIPTOR.fields_by_name.items()}
    parts = vectors.parts_of(EmbedHybridResponse, raw, {number: ours[name] for name, number in theirs.items()})
    result = mux.HybridResult.FromString(b"".join(parts.values()))
    assert result == mux.HybridResult(**fields)
    assert parts.keys() <= set(theirs.values())
    if cut % (len(raw) + 1) < len(raw):  # what was cut off is missed, or was a whole field
        some = raw[: cut % (len(raw) + 1)]
        try:
            again = vectors.renumbered(some, {number: number for number in theirs.values()})
        except ValueError:
            return
        assert sum(map(len, again.values())) == len(some)


@pytest.mark.parametrize(
    "raw",
    [
        vectors.length_delimited(9, b"unknown"),
        b"\x08\x01",  # a number
        b"\x0d\x00\x00\x80\x3f",  # a float that is not packed
        vectors.length_delimited(1, bytes(200))[:-1],
        vectors.length_delimited(1, bytes(200))[:2],
        b"\x0a",
        b"\x0a\x80",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_what_is_no_whole_field_of_those_is_not_taken_for_one(raw: bytes) -> None:
    with pytest.raises(ValueError, match="the message"):
        vectors.renumbered(vectors.length_delimited(1, b"known") + raw, {1: 2, 2: 3})


def test_occurrences_of_a_field_stay_together_wherever_they_stood() -> None:
    one, two, other = (vectors.length_delimited(number, text) for number, text in ((1, b"a"), (1, b"b"), (2, b"c")))
    expected = {1: b"".join(vectors.length_delimited(3, text) for text in (b"a", b"b")), 2: b"\x0a\x01c"}
    assert vectors.renumbered(one + other + two, {1: 3, 2: 1}) == expected
    assert vectors.renumbered(b"", {1: 3}) == {}
