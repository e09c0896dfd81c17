"""Vectors in fewer bytes, under the names that Cohere, Voyage and sentence-transformers have for them.

`int8` and `uint8` are for unit vectors, whose numbers are between -1 and 1. `binary` and `ubinary` keep the signs
alone, eight numbers a byte.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np

from appliance.core.problems import invalid

WIDEST_FLOAT16 = float(np.finfo(np.float16).max)
LARGEST = {"float16": WIDEST_FLOAT16, "int8": 1.001, "uint8": 1.001}  # of numbers that a dtype holds
OF_UNIT = "int8 and uint8 hold -1 to 1, and a vector has more: ask for float16, or normalize"
UNFIT = {
    "float16": f"float16 ends at {WIDEST_FLOAT16:.0f}, and a vector has more: ask for float32, or normalize",
    "int8": OF_UNIT,
    "uint8": OF_UNIT,
}


def unfit(dtype: str, vectors: np.ndarray) -> list[int]:
    """Which of [count, width] the dtype cannot hold: for `UNFIT`."""
    if dtype not in LARGEST or not vectors.size:
        return []
    return [int(row) for row in np.flatnonzero(np.abs(vectors).max(axis=1) > LARGEST[dtype])]


def refuse_unfit(dtype: str, vectors: np.ndarray) -> None:
    if vectors.size and np.abs(vectors).max() > LARGEST[dtype]:
        raise invalid(UNFIT[dtype])


def float16(vectors: np.ndarray) -> np.ndarray:
    refuse_unfit("float16", vectors)
    return vectors.astype(np.float16)


def int8(vectors: np.ndarray) -> np.ndarray:
    """Numbers from -1 to 1 as whole ones from -127 to 127. Others are refused: they would be cut without a word."""
    refuse_unfit("int8", vectors)
    return np.clip(np.rint(vectors * 127), -127, 127).astype(np.int8)


def uint8(vectors: np.ndarray) -> np.ndarray:
    """As `int8`, with 128 added."""
    return (int8(vectors).astype(np.int16) + 128).astype(np.uint8)


def ubinary(vectors: np.ndarray) -> np.ndarray:
    """A bit for each number, 1 where it is above 0; the first is the highest of its byte."""
    return np.packbits(vectors > 0, axis=-1)


def binary(vectors: np.ndarray) -> np.ndarray:
    """As `ubinary`, with 128 subtracted from each byte."""
    return (ubinary(vectors).astype(np.int16) - 128).astype(np.int8)


# [..., width] float32 to [..., width], or for signs [..., width / 8 rounded up]; in the order of `OutputDtype` of the
# multiplexer's messages. Raises: Problem for numbers that the dtype cannot hold.
CONVERSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda vectors: vectors,
    "float16": float16,
    "int8": int8,
    "uint8": uint8,
    "binary": binary,
    "ubinary": ubinary,
}
OF_UNIT_VECTORS = ("int8", "uint8")


def refuse_unless_unit(dtype: str, normalize: bool) -> None:
    """Raises: Problem for whole numbers of vectors of any length."""
    if dtype in OF_UNIT_VECTORS and not normalize:
        raise invalid(f"output_dtype {dtype} is for vectors of length 1: leave normalize true, or ask for float16")


def base64_of(row: np.ndarray) -> str:
    """The bytes of the numbers, little-endian; a row of float32 as OpenAI's `base64` has it."""
    return base64.b64encode(np.ascontiguousarray(row, row.dtype.newbyteorder("<")).tobytes()).decode()
