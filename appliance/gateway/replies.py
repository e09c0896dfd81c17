"""What the multiplexer answered, read: n rows for n inputs, of one width, and every number a number.

What cannot be read, or cannot be right, is refused as INTERNAL with the row's place among the inputs: JSON has no
infinity and no NaN, and a null among the numbers of a vector would be stored by whoever does not look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from appliance.gateway.refusals import Reason, Refusal
from appliance.wire import vectors
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


@contextmanager
def reading(name: str) -> Iterator[None]:
    """While a reply of the RPC ``name`` is read. Raises: Refusal for one that is none."""
    try:
        yield
    except UNREADABLE as error:
        raise wrong(name, f"cannot be read: {error or type(error).__name__}") from error


def wrong(name: str, what: str) -> Refusal:
    return Refusal(Reason.INTERNAL, f"The answer to {name} {what}. Ask again; the instance's log may say more")


def message(name: str, kind: Any, raw: bytes) -> Any:
    """A reply without numbers that the client gets."""
    with reading(name):
        return kind.FromString(raw)


def embedding(raw: bytes) -> tuple[np.ndarray, tei.Metadata]:
    """([1, width] float32, what it cost)."""
    with reading("Embed"):
        vector, rest = vectors.unpack(raw)
        told = tei.EmbedResponse.FromString(rest)
        if not len(vector) or told.embeddings:
            raise ValueError("it is not one vector")
    refuse_not_finite("Embed", vector, [0])
    return vector.reshape(1, -1), told.metadata


def token_embeddings(raw: bytes, at: int) -> tuple[np.ndarray, tei.Metadata]:
    """([tokens, width] float32, what it cost) of input ``at``."""
    with reading("EmbedAll"):
        tokens, rest = vectors.unpack_all(raw)
        told = tei.EmbedAllResponse.FromString(rest)
        if not tokens.shape[1] or told.token_embeddings:
            raise ValueError("its vectors are not of one width")
    refuse_not_finite("EmbedAll", tokens.reshape(-1), [0], at)
    return tokens, told.metadata


def sparse_embedding(raw: bytes) -> tuple[np.ndarray, np.ndarray, tei.Metadata]:
    """(indices uint32, values float32, what it cost)."""
    reply = message("EmbedSparse", tei.EmbedSparseResponse, raw)
    found = reply.sparse_embeddings
    values = np.array([entry.value for entry in found], np.float32)
    refuse_not_finite("EmbedSparse", values, [0])
    return np.array([entry.index for entry in found], np.uint32), values, reply.metadata


def batch(name: str, kind: Any, raw: bytes, rows: int, first: int) -> tuple[pa.RecordBatch, tei.Metadata]:
    """(``rows`` rows of vectors, what they cost); the first is that of input ``first``. Null rows stay."""
    with reading(name):
        reply = kind.FromString(raw)
        found = pa.ipc.open_stream(reply.arrow_ipc).read_next_batch()
        if found.num_rows != rows:
            raise ValueError(f"{found.num_rows} rows came back for {rows} texts")
        column = found.column(0)
        if pa.types.is_fixed_size_list(column.type):
            width = column.type.list_size
            starts = width * np.cumsum(np.concatenate([[0], np.asarray(column.is_valid())[:-1]]))
            numbers = column.flatten().to_numpy()  # without the null rows
        else:
            starts = column.offsets.to_numpy()[:-1]
            numbers = column.values.field("value").to_numpy()
    refuse_not_finite(name, numbers, starts, first)
    return found, reply.metadata


def matrix(found: Sequence[pa.RecordBatch]) -> list[np.ndarray]:
    """[rows, width] float32 of each batch, views on them; no row may be null."""
    with reading("EmbedArrowStream"):
        if any(part.column(0).null_count for part in found) or len({part.schema.field(0).type for part in found}) > 1:
            raise ValueError("its vectors are not of one width")
        columns = [part.column(0) for part in found]
        return [column.flatten().to_numpy().reshape(len(column), column.type.list_size) for column in columns]


def entries(found: pa.RecordBatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(indices, values) of each row of `sparse_embeddings`; no row may be null."""
    with reading("EmbedSparseArrowStream"):
        column = found.column(0)
        if column.null_count:
            raise ValueError("a row is missing")
        indices, values = (column.values.field(name).to_numpy() for name in ("index", "value"))
        ends = column.offsets.to_pylist()
    for begin, end in pairwise(ends):
        yield indices[begin:end], values[begin:end]


def predictions(raw: bytes, at: int) -> tei.PredictResponse:
    """Of input ``at``."""
    reply = message("PredictPair", tei.PredictResponse, raw)
    refuse_not_finite("PredictPair", np.array([one.score for one in reply.predictions]), [0], at)
    return reply


def ranks(raw: bytes, texts: int) -> tei.RerankResponse:
    """One rank for each of so many texts."""
    reply = message("Rerank", tei.RerankResponse, raw)
    if sorted(rank.index for rank in reply.ranks) != list(range(texts)):
        raise wrong("Rerank", f"has {len(reply.ranks)} ranks for {texts} texts, or two for the same")
    by_text = sorted(reply.ranks, key=lambda rank: rank.index)
    refuse_not_finite("Rerank", np.array([rank.score for rank in by_text]), range(texts))
    return reply


def refuse_not_finite(name: str, numbers: np.ndarray, starts: Sequence[int] | np.ndarray, first: int = 0) -> None:
    """Raises: Refusal that names the row of the first NaN or infinity. starts: where in ``numbers`` each row begins."""
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.searchsorted(starts, int(np.argmin(finite)), side="right")) - 1
        raise wrong(name, f"has numbers that are not finite (input {first + row})")
