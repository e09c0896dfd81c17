"""Sizes that an Arrow stream states: bytes and rows of all batches, and a refusal before anything expands."""

import pyarrow as pa
import pytest

from appliance.core.problems import Kind, Problem
from appliance.wire.arrow_sizes import stated_size


def stream(column: pa.Array, batches: int, compression: str | None) -> bytes:
    batch = pa.record_batch({"text": column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_the_size_is_the_same_however_the_buffers_are_compressed(batches: int, compression: str | None) -> None:
    column = pa.array(["x" * 1000] * 100)
    empty = stated_size(stream(column, 0, compression), 10**9, row_bytes=0)
    size = stated_size(stream(column, batches, compression), 10**9, row_bytes=0)
    assert size.rows == 100 * batches
    assert 0 <= size.size - empty.size - batches * 100_404 <= 64 * batches  # texts and offsets, and their padding


@pytest.mark.parametrize("row_bytes", [0, 100])
def test_a_stream_that_states_more_than_the_limit_is_refused(row_bytes: int) -> None:
    raw = stream(pa.array(["x" * 1000] * 100), 1, "zstd")
    size = stated_size(raw, 10**9, row_bytes=0).size + 100 * row_bytes
    assert len(raw) < size / 10
    stated_size(raw, size, row_bytes)
    with pytest.raises(Problem) as refusal:
        stated_size(raw, size - 1, row_bytes)
    assert (refusal.value.kind, refusal.value.code) == (Kind.EXHAUSTED, "TOO_LARGE")


def test_a_dictionary_counts_once() -> None:
    values = pa.array(["x" * 10_000])
    one, many = (
        stated_size(stream(pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), values), 1, None), 10**9, 0)
        for rows in (1, 1000)
    )
    assert (one.rows, many.rows) == (2, 1001)  # the value of the dictionary counts as a row
    assert 900 < many.size - one.size < 1100  # one byte for each index
