"""A unit vector in fewer bytes, as Cohere, Jina and Voyage have it: whole numbers, or the signs alone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from appliance.core import fields as check


def int8(row: np.ndarray) -> np.ndarray:
    """A unit vector's numbers from -1 to 1 as whole ones from -127 to 127."""
    return np.clip(np.rint(row * 127), -127, 127).astype(np.int8)


def signs(row: np.ndarray) -> np.ndarray:
    """A bit for each number, 1 where it is above 0; the first is the highest of its byte."""
    return np.packbits(row > 0)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "float": lambda row: row,
    "int8": int8,
    "uint8": lambda row: (int8(row).astype(np.int16) + 128).astype(np.uint8),
    "binary": lambda row: (signs(row).astype(np.int16) - 128).astype(np.int8),
    "ubinary": signs,
    "base64": lambda row: base64_of(row),
}
EMBEDDING_TYPE = check.one_of(*KINDS)


def base64_of(row: np.ndarray) -> str:
    """The bytes of the numbers, little-endian; a row of float32 as OpenAI's `base64` has it."""
    return base64.b64encode(np.ascontiguousarray(row, row.dtype.newbyteorder("<")).tobytes()).decode()
