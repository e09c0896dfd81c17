"""Arrow requests and replies for tests."""

from collections.abc import Sequence
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa

from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux


def ipc(table: pa.Table, compression: str | None = None, rows_per_batch: int | None = None) -> bytes:
    """An IPC stream; compression: lz4 or zstd for the buffers, `frame` for one LZ4 frame around all of it."""
    sink = pa.BufferOutputStream()
    buffers = compression if compression in ("lz4", "zstd") else None
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=buffers)) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    raw: bytes = sink.getvalue().to_pybytes()
    return lz4.frame.compress(raw) if compression == "frame" else raw


def column(texts: Sequence[str | None], kind: str = "string") -> pa.Array:
    plain = pa.array(texts, pa.string())
    if kind == "dictionary":
        return plain.dictionary_encode()
    return plain.cast({"string": pa.string(), "large": pa.large_string(), "view": pa.string_view()}[kind])


def dense_request(
    name: str, texts: Sequence[str | None], normalize: bool = True, **options: Any
) -> mux.EmbedArrowRequest:
    return mux.EmbedArrowRequest(
        target=mux.Target(instance_name=name),
        arrow_ipc=ipc(pa.table({"text": column(texts)})),
        truncate=True,
        normalize=normalize,
        **options,
    )


def rows(reply: Any) -> pa.Table:
    with pa.ipc.open_stream(reply.arrow_ipc) as reader:
        return reader.read_all()


def vectors(reply: Any) -> list[np.ndarray | None]:
    """One array a row, None for null."""
    found = rows(reply).column("embeddings").to_pylist()
    return [None if row is None else np.array(row, np.float32) for row in found]
