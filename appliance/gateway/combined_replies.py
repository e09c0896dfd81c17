"""What each text gets of a call that was made for those of several callers: what it would have got alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from appliance.gateway import multiplexer_replies
from appliance.gateway.multiplexer_replies import reading
from appliance.wire import rowusage
from appliance.wire.envelope import CACHE_BYPASS, CACHE_HIT, CACHE_KEY, CACHE_MISS, ROW_USAGE_KEY
from appliance.wire.rowusage import RowUsage
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux


class DenseReply(NamedTuple):
    """What one text gets. vectors: [1, width] float32; told: the reply's metadata."""

    vectors: np.ndarray
    metadata: tei.Metadata
    told: Mapping[str, Any]


def separate_replies(raw: bytes, told: Mapping[str, Any], texts: int) -> list[DenseReply | None]:
    """The reply to each text of a combined call; None for one that failed. Raises: Refusal."""
    reply = multiplexer_replies.batch("EmbedArrow", mux.EmbedArrowResponse, raw, texts, 0)
    costs = row_usage(told.get(ROW_USAGE_KEY), texts)
    return [
        None if row is None else DenseReply(row, *of_row(cost, reply.metadata, told))
        for row, cost in zip(separate_rows(reply.batch), costs, strict=True)
    ]


def separate_rows(batch: pa.RecordBatch) -> list[np.ndarray | None]:
    """[1, width] float32 of each row, a copy; None for a null row."""
    column = batch.column(0)
    with reading("EmbedArrow"):
        vectors = column.flatten().to_numpy().reshape(-1, 1, column.type.list_size)
    rows = iter(vectors.copy())
    return [next(rows) if valid else None for valid in column.is_valid().to_pylist()]


def row_usage(told: str | None, rows: int) -> list[RowUsage]:
    """What each of ``rows`` rows of a combined call has cost."""
    with reading("EmbedArrow"):
        costs = rowusage.unpacked(told or "")
        if len(costs) != rows:
            raise ValueError(f"it tells the cost of {len(costs)} rows, and has {rows}")
    return costs


def of_row(cost: RowUsage, total: tei.Metadata, told: Mapping[str, Any]) -> tuple[tei.Metadata, Mapping[str, Any]]:
    """What a text would have been told alone. total, told: of the whole call; its times are means, and none are of a
    text that the cache had."""
    own = tei.Metadata()
    if not cost.hit:
        own.CopyFrom(total)
    own.compute_chars, own.compute_tokens = cost.chars, cost.tokens
    if told.get(CACHE_KEY) in (None, CACHE_BYPASS):
        return own, told
    return own, {**told, CACHE_KEY: CACHE_HIT if cost.hit else CACHE_MISS}
