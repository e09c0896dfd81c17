"""Whether a reply can be right at all: readable, finite, normalised where that was asked for, and all of it there.

A broken device answers with success and with numbers that nobody may store. What is looked at costs some microseconds:
of a vector one product with itself, which is finite only if every number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from google.protobuf.message import DecodeError

from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei

NORM_TOLERANCE = 0.05  # half precision normalises to within 0.01


def flaw(method: str, request: bytes, reply: bytes) -> str | None:
    """What is wrong with the reply of ``method`` (its unary name) to TEI's ``request``; None when nothing is."""
    if method not in CHECKS:
        return None
    try:
        return CHECKS[method](request, reply)
    except (ValueError, DecodeError) as error:
        return f"it cannot be read: {error}"


def width(method: str, request: bytes, reply: bytes) -> int | None:
    """How many numbers a vector has that was asked for as the model gives it; None for every other reply."""
    if method != "Embed":
        return None
    try:
        if tei.EmbedRequest.FromString(request).HasField("dimensions"):
            return None
    except DecodeError:
        return None
    begin, end = vectors.first_field(reply)
    return (end - begin) // 4


def vector_flaw(vector: np.ndarray, normalized: bool) -> str | None:
    """[width] float32. normalized: its length shall be 1."""
    square = float(vector.dot(vector))
    if not math.isfinite(square):
        at = int(np.argmin(np.isfinite(vector)))
        if np.isfinite(vector[at]):
            return None  # large numbers, whose square alone is not finite
        return f"number {at} of its vector is {vector[at]}"
    if normalized and abs(math.sqrt(square) - 1) > NORM_TOLERANCE:
        return f"its vector has the length {math.sqrt(square):.4g}, and a normalised one was asked for"
    return None


def embed(request: bytes, reply: bytes) -> str | None:
    vector, _ = vectors.unpack(reply)
    if not len(vector):
        return "its vector is empty"
    return vector_flaw(vector, wants_normalized(request))


def wants_normalized(request: bytes) -> bool:
    """Whether it says so; what an unset field means changed with TEI 1.9."""
    try:
        return tei.EmbedRequest.FromString(request).normalize
    except DecodeError:
        return False


def embed_all(request: bytes, reply: bytes) -> str | None:
    try:
        numbers = vectors.unpack_all(reply)[0]
    except ValueError:  # another encoder's order
        tokens = tei.EmbedAllResponse.FromString(reply).token_embeddings
        numbers = np.array([number for token in tokens for number in token.embeddings])
    return None if np.isfinite(numbers).all() else "a number of its vectors is not finite"


def embed_sparse(request: bytes, reply: bytes) -> str | None:
    return finite(entry.value for entry in tei.EmbedSparseResponse.FromString(reply).sparse_embeddings)


def predict(request: bytes, reply: bytes) -> str | None:
    return finite(entry.score for entry in tei.PredictResponse.FromString(reply).predictions)


def rerank(request: bytes, reply: bytes) -> str | None:
    ranks = tei.RerankResponse.FromString(reply).ranks
    try:
        count = len(tei.RerankRequest.FromString(request).texts)
    except DecodeError:
        count = len(ranks)
    if sorted(rank.index for rank in ranks) != list(range(count)):
        return f"it ranks {len(ranks)} texts, and {count} were sent"
    return finite(rank.score for rank in ranks)


def finite(numbers: Iterable[float]) -> str | None:
    return next((f"a number of it is {number}" for number in numbers if not math.isfinite(number)), None)


CHECKS: dict[str, Callable[[bytes, bytes], str | None]] = {
    "Embed": embed,
    "EmbedAll": embed_all,
    "EmbedSparse": embed_sparse,
    "Predict": predict,
    "PredictPair": predict,
    "Rerank": rerank,
}
