"""Between TEI's messages for one text and the entries of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from appliance.core.cachekey import CachedEmbedding, Task
from appliance.core.problems import invalid
from appliance.node.context import now_ms
from appliance.wire import vectors
from appliance.wire.tei.v1 import tei_pb2 as tei

REQUESTS: dict[Task, Any] = {Task.DENSE: tei.EmbedRequest, Task.SPARSE: tei.EmbedSparseRequest}
METADATA_FIELD = 2


class CachedRequest(NamedTuple):
    """What of TEI's request is in the key. options: all fields but the text, unknown ones included."""

    text: bytes
    options: bytes


def request_of(task: Task, inner: bytes) -> CachedRequest:
    """Raises: Problem invalid."""
    try:
        request = REQUESTS[task].FromString(inner)
    except DecodeError:
        raise invalid(f"The request is not {task}Request of tei.v1") from None
    text = request.inputs.encode()
    request.ClearField("inputs")
    return CachedRequest(text, request.SerializeToString(deterministic=True))


def entry_of(task: Task, key: bytes, reply: bytes) -> tuple[CachedEmbedding, tei.Metadata]:
    """The entry of a replica's reply, and what the reply says of its cost. Raises: ValueError for one that cannot be
    read."""
    if task is Task.DENSE:
        vector, rest = vectors.unpack(reply)
        metadata = tei.EmbedResponse.FromString(rest).metadata
        content = vector.tobytes()
    else:
        answer = tei.EmbedSparseResponse.FromString(reply)
        metadata = answer.metadata
        values = answer.sparse_embeddings
        content = sparse_content([each.index for each in values], [each.value for each in values])
    return CachedEmbedding(key, now_ms(), metadata.compute_chars, metadata.compute_tokens, content), metadata


def sparse_content(indices: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(indices, "<u4").tobytes() + np.asarray(values, "<f4").tobytes()


def sparse_of(entry: CachedEmbedding) -> tuple[np.ndarray, np.ndarray]:
    """([n] uint32, [n] float32): indices and values."""
    half = len(entry.vector) // 2
    return np.frombuffer(entry.vector, "<u4", count=half // 4), np.frombuffer(entry.vector, "<f4", offset=half)


def reply_of(task: Task, entry: CachedEmbedding) -> bytes:
    """TEI's reply, with the counts of the computation and no times."""
    metadata = tei.Metadata(compute_chars=entry.chars, compute_tokens=entry.tokens)
    if task is Task.DENSE:
        packed = vectors.length_delimited(1, entry.vector) if entry.vector else b""
        return packed + vectors.length_delimited(METADATA_FIELD, metadata.SerializeToString())
    indices, values = sparse_of(entry)
    pairs = [tei.SparseValue(index=index, value=value) for index, value in zip(indices.tolist(), values, strict=True)]
    return tei.EmbedSparseResponse(sparse_embeddings=pairs, metadata=metadata).SerializeToString()
