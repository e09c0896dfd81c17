"""Packed vectors: the bytes that protobuf itself would write, whatever array they come from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
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
