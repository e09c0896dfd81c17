"""The formats of vectors that a request may ask for, as its JSON writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from appliance.core import fields as check
from appliance.core.problems import Problem
from appliance.gateway.refusals import Reason, Refusal
from appliance.wire import quantization
from appliance.wire.quantization import CONVERSIONS, base64_of

OUTPUT_DTYPE = check.one_of(*CONVERSIONS)
FORMATS: dict[str, Callable[[np.ndarray], Any]] = {
    "float": lambda row: row,
    "base64": base64_of,
    **CONVERSIONS,
}
FORMAT = check.one_of(*FORMATS)


def dtype_value(dtype: str) -> int:
    """The number of a dtype in the multiplexer's messages."""
    return list(CONVERSIONS).index(dtype)


def refuse_unless_unit(dtype: str, normalize: bool) -> None:
    """Raises: Refusal for whole numbers of vectors of any length."""
    try:
        quantization.refuse_unless_unit(dtype, normalize)
    except Problem as problem:
        raise Refusal(Reason.VALIDATION, problem.message) from None


def converted(block: np.ndarray, dtype: str) -> np.ndarray:
    """[rows, width] float32 in another dtype. Raises: Refusal for numbers that it cannot hold."""
    try:
        return CONVERSIONS[dtype](block)
    except Problem as problem:
        raise Refusal(Reason.VALIDATION, problem.message) from None
