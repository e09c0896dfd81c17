"""Whether a reply can be right: it is readable, finite and complete, and normalised if the request asked for that.

A broken device answers with success and with wrong numbers, which the caller would store. A check costs some
microseconds: a vector is multiplied with itself, and the product is finite only if every number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from google.protobuf.message import DecodeError

from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest, EmbedHybridResponse
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest

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
    """The width of the model's vectors, by a reply to a request without `dimensions`; None for every other reply."""
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
    """What is wrong with a vector, [width] float32; None when nothing is. normalized: its length must be 1."""
    square = float(vector.dot(vector))
    if not math.isfinite(square):
        at = int(np.argmin(np.isfinite(vector)))
        if np.isfinite(vector[at]):
            return None  # its numbers are finite and large: only the square overflows
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
    """Whether the request says so. An unset field counts as no: its meaning changed with TEI 1.9."""
    try:
        return tei.EmbedRequest.FromString(request).normalize
    except DecodeError:
        return False


def embed_all(request: bytes, reply: bytes) -> str | None:
    try:
        numbers = vectors.unpack_all(reply)[0]
    except ValueError:  # another encoder may order the fields differently
        tokens = tei.EmbedAllResponse.FromString(reply).token_embeddings
        numbers = np.array([number for token in tokens for number in token.embeddings])
    return None if np.isfinite(numbers).all() else "a number of its vectors is not finite"


def embed_sparse(request: bytes, reply: bytes) -> str | None:
    return finite(entry.value for entry in tei.EmbedSparseResponse.FromString(reply).sparse_embeddings)


def embed_image(request: bytes, reply: bytes) -> str | None:
    vector, _ = vectors.unpack(reply)
    asked = EmbedImageRequest.FromString(request)
    return vector_flaw(vector, asked.normalize or not asked.HasField("normalize"))


def embed_hybrid(request: bytes, reply: bytes) -> str | None:
    answer = EmbedHybridResponse.FromString(reply)
    if wrong := finite(entry.value for entry in answer.sparse_embeddings):
        return wrong
    normalized = EmbedHybridRequest.FromString(request).normalize
    rows = (np.array(token.embeddings, np.float32) for token in answer.token_embeddings)
    dense = np.array(answer.embeddings, np.float32)
    flaw = vector_flaw(dense, normalized) if len(dense) else None
    return flaw or next((wrong for row in rows if (wrong := vector_flaw(row, normalized=False))), None)


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
    "EmbedHybrid": embed_hybrid,
    "EmbedImage": embed_image,
    "Predict": predict,
    "PredictPair": predict,
    "Rerank": rerank,
}
