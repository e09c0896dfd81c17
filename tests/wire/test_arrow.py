"""Arrow in and out: the texts that the rows refer to, and the replies as one batch."""

from collections.abc import Callable
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pytest

from appliance.core.problems import Kind, Problem
from appliance.wire import arrow
from appliance.wire.arrow import read_rows
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import ipc


@pytest.mark.parametrize(
    ("indices", "texts"),
    [
        ([3, 1, 3, None], [b"d", b"b", b"d", None]),
        ([], []),
        ([None, None], [None, None]),
        ([2, 4, 0], [None, b"b", b""]),  # 2 is a null value, and 4 is the text of 1 again
    ],
)
def test_values_of_a_dictionary_that_no_row_uses_do_not_count(
    indices: list[int | None], texts: list[bytes | None]
) -> None:
    values = pa.array(["", "b", None, "d", "b", "no row refers to this"])
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), values)
    rows = read_rows(ipc(pa.table({"text": column})), 10**6)
    assert [rows.texts[at] if at >= 0 else None for at in rows.text_of_row] == texts
    assert sorted(rows.texts) == sorted({text for text in texts if text is not None})
    assert isinstance(rows.text_of_row, np.ndarray)


def test_dictionaries_with_a_null_are_read_together() -> None:
    parts = [(["a", None], [0, 1, None]), (["b", None, "a"], [2, 1, 0])]
    chunks = [
        pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values)) for values, indices in parts
    ]
    rows = read_rows(ipc(pa.table({"text": pa.chunked_array(chunks)})), 10**6)
    assert [rows.texts[at] if at >= 0 else None for at in rows.text_of_row] == [b"a", None, None, b"a", None, b"b"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda one: one + one, "follow the end of the Arrow stream"),
        (lambda one: lz4.frame.compress(one) + lz4.frame.compress(one), "follow the LZ4 frame"),
        (lambda one: lz4.frame.compress(one, store_size=False) + b"more", "follow the LZ4 frame"),
        (lambda one: lz4.frame.compress(one, store_size=False)[:-4], "cut short"),
    ],
    ids=["two streams", "two frames", "more behind a frame", "half a frame"],
)
def test_what_follows_a_stream_is_refused(body: Callable[[bytes], bytes], words: str) -> None:
    """It was dropped, and the answer had fewer rows than were sent."""
    with pytest.raises(Problem, match=words) as refusal:
        read_rows(body(ipc(pa.table({"text": ["one", "two"]}))), 10**6)
    assert refusal.value.kind is Kind.INVALID


@pytest.mark.parametrize("states_size", [True, False])
def test_a_frame_of_lz4_is_booked_before_it_is_expanded(states_size: bool) -> None:
    raw = ipc(pa.table({"text": ["one", None, "one"]}))
    booked: list[int] = []
    rows = read_rows(lz4.frame.compress(raw, store_size=states_size), 10**6, book=booked.append)
    assert (rows.texts, rows.text_of_row.tolist()) == ([b"one"], [0, -1, 0])
    assert sum(booked) > len(raw)


@pytest.mark.parametrize("states_size", [True, False])
def test_a_frame_of_lz4_over_the_limit_is_refused(states_size: bool) -> None:
    with pytest.raises(Problem) as refusal:
        read_rows(lz4.frame.compress(bytes(10**6), store_size=states_size), 10**5)
    assert (refusal.value.kind, refusal.value.code) == (Kind.EXHAUSTED, "TOO_LARGE")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_column_of_any_string_type_is_read_with_its_nulls(kind: pa.DataType) -> None:
    column = arrow.read_column(ipc(pa.table({"other": [1, 2, 3], "a": pa.array(["x", None, "x"], kind)})), 10**6)
    assert (column.type, column.to_pylist()) == (pa.large_string(), ["x", None, "x"])


def test_a_text_that_many_rows_refer_to_is_refused_when_written_out_it_is_over_the_limit() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int16()), pa.array(["x" * 1000]))
    raw = ipc(pa.table({"text": column}))
    assert len(read_rows(raw, 10**6 - 1)) == 1000
    with pytest.raises(Problem, match="expand"):
        arrow.read_column(raw, 10**6 - 1)


def test_a_table_without_a_string_column_is_refused() -> None:
    with pytest.raises(Problem, match="No string column among a"):
        read_rows(ipc(pa.table({"a": [1]})), 10**6)
    with pytest.raises(Problem, match='Column "text" must hold strings, not int64'):
        read_rows(ipc(pa.table({"text": [1], "b": ["x"]})), 10**6)


@pytest.mark.parametrize("errors", [None, ["", "bad", None]])
def test_a_dense_reply_has_a_vector_for_each_row_or_null(errors: list[str | None] | None) -> None:
    vectors = np.array([[1, 2], [3, 4]], np.float32)
    table = pa.ipc.open_stream(arrow.dense_reply(vectors, np.array([1, -1, 0]), errors)).read_all()
    assert table["embeddings"].to_pylist() == [[3, 4], None, [1, 2]]
    assert table.column_names == ["embeddings", *(["error"] if errors else [])]
    assert errors is None or table["error"].to_pylist() == errors


def test_a_sparse_reply_has_the_entries_of_each_row_or_null() -> None:
    entries = (np.array([7, 9], np.uint32), np.array([0.5, 2], np.float32))
    table = pa.ipc.open_stream(arrow.sparse_reply([entries, None], None)).read_all()
    assert table["sparse_embeddings"].to_pylist() == [[{"index": 7, "value": 0.5}, {"index": 9, "value": 2.0}], None]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 0, 1], [0, 1], []])
def test_rows_have_their_vectors_whatever_their_order(order: list[int]) -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    table = pa.ipc.open_stream(arrow.dense_reply(vectors, np.array(order, np.int64), None)).read_all()
    assert table["embeddings"].to_pylist() == [vectors[each].tolist() for each in order]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16384])
@pytest.mark.parametrize("metadata", [None, tei.Metadata(), tei.Metadata(compute_tokens=7, total_time_ns=1 << 40)])
@pytest.mark.parametrize("kind", [mux.EmbedArrowResponse, mux.EmbedSparseArrowResponse])
def test_a_reply_that_is_put_together_is_the_message(size: int, metadata: tei.Metadata | None, kind: Any) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    reply = kind.FromString(arrow.reply_message(pa.py_buffer(content), metadata))
    assert reply == kind(arrow_ipc=content, metadata=metadata)
