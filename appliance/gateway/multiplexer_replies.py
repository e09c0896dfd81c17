"""Reading the multiplexer's replies: each has n rows for n inputs, vectors of one width, and finite numbers.

A reply that cannot be read, or cannot be right, is refused as INTERNAL, with the number of the input at fault: JSON has
neither infinity nor NaN, and a null among the numbers of a vector would be stored by a client that does not look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from appliance.gateway.refusals import Reason, Refusal
from appliance.wire import arrow, vectors
from appliance.wire.tei.v1 import tei_pb2 as tei

# protobuf, numpy and Arrow each have their own; StopIteration: an Arrow stream without a batch.
UNREADABLE = (
    DecodeError,
    pa.ArrowException,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    StopIteration,
)


class DenseVectors(NamedTuple):
    """values: [vectors, width] float32."""

    values: np.ndarray
    metadata: tei.Metadata


class SparseVector(NamedTuple):
    indices: np.ndarray  # uint32
    values: np.ndarray  # float32


class SparseReply(NamedTuple):
    vector: SparseVector
    metadata: tei.Metadata


class BatchReply(NamedTuple):
    batch: pa.RecordBatch
    metadata: tei.Metadata


@contextmanager
def reading(name: str) -> Iterator[None]:
    """While a reply of the RPC ``name`` is read. Raises: Refusal when it cannot be."""
    try:
        yield
    except UNREADABLE as error:
        raise wrong_reply(name, f"cannot be read: {error or type(error).__name__}") from error


def wrong_reply(name: str, what: str) -> Refusal:
    return Refusal(Reason.INTERNAL, f"The answer to {name} {what}. Ask again; the instance's log may say more")


def message(name: str, kind: Any, raw: bytes) -> Any:
    """A reply without numbers that the client gets."""
    with reading(name):
        return kind.FromString(raw)


def embedding(raw: bytes) -> DenseVectors:
    """One vector."""
    with reading("Embed"):
        vector, rest = vectors.unpack(raw)
        reply = tei.EmbedResponse.FromString(rest)
        if not len(vector) or reply.embeddings:
            raise ValueError("it is not one vector")
    refuse_not_finite("Embed", vector, [0])
    return DenseVectors(vector.reshape(1, -1), reply.metadata)


def token_embeddings(raw: bytes, at: int) -> DenseVectors:
    """A vector for each token of input ``at``."""
    with reading("EmbedAll"):
        tokens, rest = vectors.unpack_all(raw)
        reply = tei.EmbedAllResponse.FromString(rest)
        if not tokens.shape[1] or reply.token_embeddings:
            raise ValueError("its vectors are not of one width")
    refuse_not_finite("EmbedAll", tokens.reshape(-1), [0], at)
    return DenseVectors(tokens, reply.metadata)


def sparse_embedding(raw: bytes) -> SparseReply:
    reply = message("EmbedSparse", tei.EmbedSparseResponse, raw)
    entries = reply.sparse_embeddings
    values = np.array([entry.value for entry in entries], np.float32)
    refuse_not_finite("EmbedSparse", values, [0])
    indices = np.array([entry.index for entry in entries], np.uint32)
    return SparseReply(SparseVector(indices, values), reply.metadata)


def batch(name: str, reply_type: Any, raw: bytes, rows: int, first: int) -> BatchReply:
    """A reply of ``rows`` rows, the first of which is that of input ``first``. Null rows stay."""
    with reading(name):
        reply = reply_type.FromString(raw)
        received = pa.ipc.open_stream(reply.arrow_ipc, options=arrow.READ_IN_THREAD).read_next_batch()
        if received.num_rows != rows:
            raise ValueError(f"{received.num_rows} rows came back for {rows} texts")
        column = received.column(0)
        if pa.types.is_fixed_size_list(column.type):
            width = column.type.list_size
            starts = width * np.cumsum(np.concatenate([[0], np.asarray(column.is_valid())[:-1]]))
            numbers = column.flatten().to_numpy(zero_copy_only=False)  # without the null rows
        elif pa.types.is_fixed_size_list(column.type.value_type):
            starts = column.type.value_type.list_size * column.offsets.to_numpy()[:-1]
            numbers = column.values.flatten().to_numpy(zero_copy_only=False)
        else:
            starts = column.offsets.to_numpy()[:-1]
            numbers = column.values.field("value").to_numpy()
    refuse_not_finite(name, numbers, starts, first)
    return BatchReply(received, reply.metadata)


def matrix(batches: Sequence[pa.RecordBatch]) -> list[np.ndarray]:
    """[rows, width] float32 of each batch, views on them; no row may be null."""
    with reading("EmbedArrowStream"):
        types = {batch.schema.field(0).type for batch in batches}
        if any(batch.column(0).null_count for batch in batches) or len(types) > 1:
            raise ValueError("its vectors are not of one width")
        columns = [batch.column(0) for batch in batches]
        return [column.flatten().to_numpy().reshape(len(column), column.type.list_size) for column in columns]


def token_matrices(batch: pa.RecordBatch) -> Iterator[np.ndarray]:
    """[tokens, width] float32 of each row, views on the batch; no row may be null."""
    with reading("EmbedAllArrowStream"):
        column = batch.column(0)
        if column.null_count:
            raise ValueError("a row is missing")
        width = column.type.value_type.list_size
        values = column.values.flatten().to_numpy().reshape(-1, width)
        ends = column.offsets.to_pylist()
    for begin, end in pairwise(ends):
        yield values[begin:end]


def sparse_vectors(batch: pa.RecordBatch) -> Iterator[SparseVector]:
    """Each row of `sparse_embeddings`; no row may be null."""
    with reading("EmbedSparseArrowStream"):
        column = batch.column(0)
        if column.null_count:
            raise ValueError("a row is missing")
        indices, values = (column.values.field(name).to_numpy() for name in ("index", "value"))
        ends = column.offsets.to_pylist()
    for begin, end in pairwise(ends):
        yield SparseVector(indices[begin:end], values[begin:end])


def predictions(raw: bytes, at: int) -> tei.PredictResponse:
    """The predictions of input ``at``."""
    reply = message("PredictPair", tei.PredictResponse, raw)
    refuse_not_finite("PredictPair", np.array([one.score for one in reply.predictions]), [0], at)
    return reply


def ranks(raw: bytes, texts: int) -> tei.RerankResponse:
    """One rank for each of ``texts`` texts."""
    reply = message("Rerank", tei.RerankResponse, raw)
    if sorted(rank.index for rank in reply.ranks) != list(range(texts)):
        raise wrong_reply("Rerank", f"has {len(reply.ranks)} ranks for {texts} texts, or two for the same")
    by_text = sorted(reply.ranks, key=lambda rank: rank.index)
    refuse_not_finite("Rerank", np.array([rank.score for rank in by_text]), range(texts))
    return reply


def refuse_not_finite(name: str, numbers: np.ndarray, starts: Sequence[int] | np.ndarray, first: int = 0) -> None:
    """Raises: Refusal that names the row of the first NaN or infinity. starts: where in ``numbers`` each row begins."""
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.searchsorted(starts, int(np.argmin(finite)), side="right")) - 1
        raise wrong_reply(name, f"has numbers that are not finite (input {first + row})")
