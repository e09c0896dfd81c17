"""Vectors in fewer bytes: what comes back is within the dtype's own error, and the names mean what others mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from appliance.core.problems import Problem
from appliance.wire.quantization import CONVERSIONS, refuse_unless_unit
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

UNIT = arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 40)), elements=st.floats(-1, 1, width=32))


@given(UNIT)
def test_numbers_come_back_within_half_a_step(vectors: np.ndarray) -> None:
    np.testing.assert_allclose(CONVERSIONS["float16"](vectors).astype(np.float32), vectors, atol=2**-11)
    small = CONVERSIONS["int8"](vectors)
    np.testing.assert_allclose(small / 127, vectors, atol=0.5 / 127 + 1e-6)
    np.testing.assert_array_equal(CONVERSIONS["uint8"](vectors).astype(int) - 128, small)


@given(UNIT)
def test_signs_are_bits_the_first_in_the_highest(vectors: np.ndarray) -> None:
    signs = CONVERSIONS["ubinary"](vectors)
    assert signs.shape == (len(vectors), -(-vectors.shape[1] // 8))
    np.testing.assert_array_equal(np.unpackbits(signs, axis=-1)[:, : vectors.shape[1]], vectors > 0)
    np.testing.assert_array_equal(CONVERSIONS["binary"](vectors).astype(int) + 128, signs)


def test_float16_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(Problem, match="float16 ends at 65504"):
        CONVERSIONS["float16"](np.array([[1.0, -70000.0]], np.float32))


def test_whole_numbers_are_for_unit_vectors() -> None:
    for dtype in CONVERSIONS:
        refuse_unless_unit(dtype, normalize=True)
    with pytest.raises(Problem, match="uint8 is for vectors of length 1"):
        refuse_unless_unit("uint8", normalize=False)
    refuse_unless_unit("binary", normalize=False)


def test_the_messages_have_the_same_names_in_the_same_order() -> None:
    assert [name.removeprefix("OUTPUT_DTYPE_").lower() for name in mux.OutputDtype.keys()] == list(CONVERSIONS)  # noqa: SIM118
