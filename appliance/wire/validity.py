"""Whether a reply can be right: it is readable, finite and complete, and normalised if the request asked for that.

A broken device answers with success and with wrong numbers, which the caller would store. A check costs some
microseconds: a vector is multiplied with itself, and the product is finite only if every number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest, EmbedHybridResponse
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest

SPARSE_ENTRY, SPARSE_VALUE = 0x0A, 0x15  # as tags: a message in field 1, and in it a float in field 2
# The fields of an EmbedHybridResponse, and where each stands in the reply that is of its kind alone.
DENSE, SPARSE, TOKENS = (
    EmbedHybridResponse.DESCRIPTOR.fields_by_name[name].number
    for name in ("embeddings", "sparse_embeddings", "token_embeddings")
)
AS_REPLIES = {DENSE: 1, SPARSE: 1, TOKENS: 1, EmbedHybridResponse.DESCRIPTOR.fields_by_name["metadata"].number: 2}
NORM_TOLERANCE = 0.05  # half precision normalises to within 0.01


class Inspection(NamedTuple):
    """flaw: what is wrong with a reply; None when nothing is. width: of the model's vectors, where it tells that."""

    flaw: str | None = None
    width: int | None = None


RIGHT = Inspection()


def inspect(method: str, request: bytes, reply: bytes) -> Inspection:
    """Look at the reply of ``method`` (its unary name) to TEI's ``request``."""
    try:
        if method == "Embed":
            return embed(request, reply)
        return Inspection(FLAWS[method](request, reply)) if method in FLAWS else RIGHT
    except (ValueError, DecodeError) as error:
        return Inspection(f"it cannot be read: {error}")


def vector_flaw(vector: np.ndarray, normalized: bool) -> str | None:
    """What is wrong with a vector, [width] float32; None when nothing is. normalized: its length must be 1."""
    square = float(vector.dot(vector))
    if not math.isfinite(square):
        at = int(np.argmin(np.isfinite(vector)))
        if not np.isfinite(vector[at]):
            return f"number {at} of its vector is {vector[at]}"
        square = float(np.square(vector, dtype=np.float64).sum())  # its numbers are finite and large
    if normalized and abs(math.sqrt(square) - 1) > NORM_TOLERANCE:
        return f"its vector has the length {math.sqrt(square):.4g}, and a normalised one was asked for"
    return None


def embed(request: bytes, reply: bytes) -> Inspection:
    """An unset `normalize` counts as no: its meaning changed with TEI 1.9. With `dimensions` the width is not the
    model's."""
    vector, _ = vectors.unpack(reply)
    if not len(vector):
        return Inspection("its vector is empty")
    try:
        asked = tei.EmbedRequest.FromString(request)
    except DecodeError:
        return Inspection(vector_flaw(vector, normalized=False))
    width = None if asked.HasField("dimensions") else len(vector)
    return Inspection(vector_flaw(vector, asked.normalize), width)


def embed_all(request: bytes, reply: bytes) -> str | None:
    try:
        numbers = vectors.unpack_all(reply)[0]
    except ValueError:  # another encoder may order the fields differently
        tokens = tei.EmbedAllResponse.FromString(reply).token_embeddings
        numbers = np.array([number for token in tokens for number in token.embeddings], np.float32)
    return "a number of its vectors is not finite" if vector_flaw(numbers.ravel(), normalized=False) else None


def embed_sparse(request: bytes, reply: bytes) -> str | None:
    entries = tei.EmbedSparseResponse.FromString(reply).sparse_embeddings
    return None if count_finite(reply) == len(entries) else finite([entry.value for entry in entries])


def count_finite(reply: bytes) -> int:
    """How many sparse values of a readable reply, from the first on, are seen to be finite without being read.

    An encoder puts a value at the end of its entry, little endian, and what is not finite has all bits of the exponent.
    An entry that is too short for one is 0, whatever stands before it.
    To read a hundred of them as messages takes 25 us, and 110 where the process was idle before; this takes 12 and 40.
    """
    count, at, size = 0, 0, len(reply)
    while at < size and reply[at] == SPARSE_ENTRY:
        at += 2 + reply[at + 1]
        if at > size or reply[at - 5] != SPARSE_VALUE or (reply[at - 1] & 0x7F == 0x7F and reply[at - 2] & 0x80):
            break
        count += 1
    return count


def embed_image(request: bytes, reply: bytes) -> str | None:
    vector, _ = vectors.unpack(reply)
    asked = EmbedImageRequest.FromString(request)
    return vector_flaw(vector, asked.normalize or not asked.HasField("normalize"))


def embed_hybrid(request: bytes, reply: bytes) -> str | None:
    parts = vectors.parts_of(EmbedHybridResponse, reply, AS_REPLIES)
    if SPARSE in parts and (wrong := embed_sparse(request, parts[SPARSE])):
        return wrong
    if TOKENS in parts and (wrong := embed_all(request, parts[TOKENS])):
        return wrong
    if DENSE not in parts:
        return None
    vector, _ = vectors.unpack(parts[DENSE])
    return vector_flaw(vector, EmbedHybridRequest.FromString(request).normalize)


def predict(request: bytes, reply: bytes) -> str | None:
    return finite([entry.score for entry in tei.PredictResponse.FromString(reply).predictions])


def rerank(request: bytes, reply: bytes) -> str | None:
    ranks = tei.RerankResponse.FromString(reply).ranks
    try:
        count = len(tei.RerankRequest.FromString(request).texts)
    except DecodeError:
        count = len(ranks)
    if sorted(rank.index for rank in ranks) != list(range(count)):
        return f"it ranks {len(ranks)} texts, and {count} were sent"
    return finite([rank.score for rank in ranks])


def finite(numbers: Sequence[float]) -> str | None:
    """numbers: of float32, whose sum is finite only if every one is."""
    if math.isfinite(sum(numbers)):
        return None
    return next(f"a number of it is {number}" for number in numbers if not math.isfinite(number))


FLAWS: dict[str, Callable[[bytes, bytes], str | None]] = {
    "EmbedAll": embed_all,
    "EmbedSparse": embed_sparse,
    "EmbedHybrid": embed_hybrid,
    "EmbedImage": embed_image,
    "Predict": predict,
    "PredictPair": predict,
    "Rerank": rerank,
}
