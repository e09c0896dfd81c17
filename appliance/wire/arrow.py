"""Arrow IPC in and out: texts of any string type over all record batches, vectors back in one batch.

The sizes that the messages state are added up before anything is decompressed (`arrow_sizes`): a bomb is refused first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
from google.protobuf.message import Message

from appliance.core.budget import READ, ROW
from appliance.core.problems import Problem, invalid
from appliance.wire import vectors
from appliance.wire.arrow_sizes import stated_size, too_large

LZ4_MAGIC = b"\x04\x22\x4d\x18"
PIECE_BYTES = 4 * 1024 * 1024
ROW_BYTES = 320  # memory that every row takes, however short its text: 1.8 GB for 5 million equal sparse rows
STRING_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
# Arrow (26) would hand each buffer to a pool of threads: 70 us for a small batch, and nothing gained for 4,000 rows.
READ_IN_THREAD = pa.ipc.IpcReadOptions(use_threads=False)
WRITE_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
SPARSE_ITEM = pa.struct([pa.field("index", pa.uint32(), False), pa.field("value", pa.float32(), False)])


@dataclass(frozen=True)
class Rows:
    """The rows of a request. texts: the distinct ones, UTF-8, or images; text_of_row: [rows], an index of them, -1 for
    null."""

    texts: list[bytes]
    text_of_row: np.ndarray
    images: bool = False

    def __len__(self) -> int:
        return len(self.text_of_row)


def book_nothing(size: int) -> None:
    """For callers of `read_rows` without a budget for memory."""


def read_rows(raw: bytes, limit: int, row_bytes: int = ROW_BYTES, book: Callable[[int], object] = book_nothing) -> Rows:
    """The rows of an IPC stream. limit: the most bytes that it may expand to, with ``row_bytes`` added for each row.

    book: called with the bytes that reading needs, before they are used; may raise a Problem.
    Raises: Problem for bytes that are no Arrow stream, have no string column, or expand to more.
    """
    try:
        column = validated(content_column(read_table(raw, limit, row_bytes, book)))
        return distinct(column, limit)
    except (pa.ArrowException, ValueError, IndexError, OSError, RuntimeError) as error:
        raise invalid(f"Invalid Arrow IPC: arrow_ipc is not a stream that can be read: {error}") from error


def validated(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Arrow uses offsets and indices as it read them: a wrong one ends the process."""
    column.validate(full=True)
    return column


def read_column(raw: bytes, limit: int, book: Callable[[int], object] = book_nothing) -> pa.Array:
    """The texts of an IPC stream as one large_string array, or its images as large_binary, with nulls.

    Raises: Problem as `read_rows`, and when the array would have more than ``limit`` bytes.
    """
    rows = read_rows(raw, limit, row_bytes=0, book=book)
    sizes = np.array([len(text) for text in rows.texts], np.int64)
    if int(sizes[rows.text_of_row[rows.text_of_row >= 0]].sum()) > limit:
        raise too_large(limit)
    try:
        unique = pa.array(rows.texts, pa.large_binary())
        unique = unique if rows.images else unique.cast(pa.large_string())
    except pa.ArrowException as error:
        raise invalid(f"The texts are not UTF-8: {error}") from error
    return unique.take(pa.array(rows.text_of_row, mask=rows.text_of_row < 0))


def is_large(raw: bytes, limit: int) -> bool:
    """Whether an IPC stream would expand to more than ``limit`` bytes, found without expanding it."""
    if raw[:4] == LZ4_MAGIC:
        return True  # a frame need not state its size
    try:
        stated_size(raw, limit, row_bytes=0)
    except Problem:
        return True
    except (pa.ArrowException, ValueError, IndexError, OSError, RuntimeError):
        return False  # it is no Arrow, and `read_rows` will refuse it
    return False


def distinct(column: pa.ChunkedArray, limit: int) -> Rows:
    """Each distinct text once. Neither a dictionary nor a view is written out row by row: a megabyte to which a
    million rows refer stays one megabyte."""
    if pa.types.is_dictionary(column.type):
        if any(chunk.dictionary.null_count for chunk in column.chunks):  # which Arrow (26) cannot unify
            column = pa.chunked_array([without_null_values(chunk) for chunk in column.chunks])
        whole = one_array(column.unify_dictionaries())
        values = distinct(pa.chunked_array([whole.dictionary]), limit)
        value_of_row = np.asarray(whole.indices.cast(pa.int64()).fill_null(-1))
        text_of_value = np.append(values.text_of_row, -1)  # the last one is for -1, a null row
        return only_used(values.texts, text_of_value[value_of_row])
    if pa.types.is_string_view(column.type):
        column = pa.chunked_array([with_empty_nulls(chunk) for chunk in column.chunks], column.type)
        if sum(map(written_out_bytes, column.chunks)) > limit:
            raise too_large(limit)
    images = is_binary(column.type)
    kind = pa.large_binary() if images else pa.large_string()
    column = column if column.type == kind else column.cast(kind)  # looking costs a fortieth of casting a small one
    encoded = one_array(column).dictionary_encode()
    del column
    indices = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    return Rows(encoded.dictionary.view(pa.large_binary()).to_pylist(), indices.to_numpy(), images)


def without_null_values(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    """The same rows, where a null is one of its own, and no value of the dictionary."""
    valid = np.asarray(chunk.dictionary.is_valid())
    new_index = np.append(np.where(valid, np.cumsum(valid) - 1, -1), -1)  # the last one is for -1, a null row
    indices = new_index[np.asarray(chunk.indices.cast(pa.int64()).fill_null(-1))]
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), chunk.dictionary.drop_null())


def only_used(texts: list[bytes], text_of_row: np.ndarray) -> Rows:
    """The rows without the dictionary values that none of them refers to: these may be invalid."""
    is_text = text_of_row >= 0
    used, new_index = np.unique(text_of_row[is_text], return_inverse=True)
    text_of_row = text_of_row.copy()
    text_of_row[is_text] = new_index
    return Rows([texts[index] for index in used.tolist()], text_of_row)


def views_of(chunk: pa.Array) -> np.ndarray:
    """[rows, 4] int32: the views of a string_view array. A view begins with the length of its text."""
    views = np.frombuffer(chunk.buffers()[1] or b"", np.int32, count=4 * (chunk.offset + len(chunk))).reshape(-1, 4)
    return views[chunk.offset :]


def with_empty_nulls(chunk: pa.Array) -> pa.Array:
    """The array with empty views for nulls. The view of a null may point anywhere: no validation checks it, and Arrow's
    cast (26) follows it out of the process's memory."""
    valid, views = np.asarray(chunk.is_valid()), views_of(chunk).copy()
    views[~valid] = 0
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(chunk.type, len(chunk), [bitmap, pa.py_buffer(views), *chunk.buffers()[2:]])


def written_out_bytes(chunk: pa.Array) -> int:
    """Bytes that a string_view array has when it is written out row by row."""
    return int(views_of(chunk)[:, 0].sum(dtype=np.int64))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)


def read_table(raw: bytes, limit: int, row_bytes: int, book: Callable[[int], object]) -> pa.Table:
    booked = 0
    if raw[:4] == LZ4_MAGIC:
        raw, booked = unpack_frame(raw, limit, book)
    size, rows = stated_size(raw, limit, row_bytes)
    book(max(0, READ * size + ROW * rows - booked))
    source = pa.BufferReader(raw)
    with pa.ipc.open_stream(source, options=READ_IN_THREAD) as reader:
        table = reader.read_all()
    if rest := len(raw) - source.tell():
        raise ValueError(f"{rest} bytes follow the end of the Arrow stream: send one stream")
    return table


def unpack_frame(raw: bytes, limit: int, book: Callable[[int], object]) -> tuple[bytes, int]:
    """(the content of one LZ4 frame, how many bytes of its reading are booked).

    A frame that states its size is booked as a whole; any other is booked piece by piece.
    """
    frame = lz4.frame.LZ4FrameDecompressor()
    stated = lz4.frame.get_frame_info(raw)["content_size"]
    if stated > limit:
        raise too_large(limit)
    if stated:
        book((1 + READ) * stated)
        plain: bytes = frame.decompress(raw, max_length=stated + 1)
        if len(plain) > stated:
            raise ValueError("the LZ4 frame is longer than it states")
        refuse_unless_whole(frame)
        return plain, READ * stated
    pieces, size = [frame.decompress(raw, max_length=PIECE_BYTES)], 0
    while pieces[-1]:
        size += len(pieces[-1])
        if size > limit:
            raise too_large(limit)
        book(2 * len(pieces[-1]))  # the pieces, and their concatenation
        pieces.append(b"" if frame.eof else frame.decompress(b"", max_length=PIECE_BYTES))
    refuse_unless_whole(frame)
    return b"".join(pieces), 0


def refuse_unless_whole(frame: lz4.frame.LZ4FrameDecompressor) -> None:
    """What is read of a part of the frames may be a whole Arrow stream, with fewer rows. Raises: ValueError."""
    if not frame.eof:
        raise ValueError("the LZ4 frame is cut short")
    if frame.unused_data:
        raise ValueError(f"{len(frame.unused_data)} bytes follow the LZ4 frame: send one frame")


def content_column(table: pa.Table) -> pa.ChunkedArray:
    """The column `text`, else the first string column; without any, `image`, else the first binary column."""
    schema = table.schema
    named_text = [at for at, name in enumerate(schema.names) if name == "text" and is_text(schema.field(at).type)]
    strings = [at for at in range(len(schema)) if is_text(schema.field(at).type)]
    if "text" in schema.names and not named_text:
        raise invalid(f'Column "text" must hold strings, not {schema.field("text").type}')
    images = [at for at in range(len(schema)) if is_binary(schema.field(at).type)]
    if "image" in schema.names and not strings and not is_binary(schema.field("image").type):
        raise invalid(f'Column "image" must hold binary or large_binary, not {schema.field("image").type}')
    if not strings and not images:
        raise invalid(
            f"No string column among {', '.join(map(str, schema.names)) or 'no columns'}: send one named text"
        )
    named_image = [at for at in images if schema.names[at] == "image"]
    return table.column((named_text or strings or named_image or images)[0])


def is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(matches(kind) for matches in STRING_TYPES)


# -- replies ----------------------------------------------------------------------------------------------------------


def dense_reply(table: np.ndarray, vector_of_row: np.ndarray, errors: Sequence[str | None] | None) -> pa.Buffer:
    """One batch with the column `embeddings`: row i is ``table[vector_of_row[i]]``, or null where that is -1.

    table: [texts, dim] of a dtype of `quantization`. errors: the column `error`, one for each row; None leaves
    the column out.
    """
    dim, number = table.shape[1], pa.from_numpy_dtype(table.dtype)
    kind = pa.list_(pa.field("item", number, nullable=False), dim)
    null = vector_of_row < 0
    if np.array_equal(vector_of_row, np.arange(len(table))):
        chosen = table  # as mostly: every text once
    elif len(table):
        chosen = table[np.where(null, 0, vector_of_row)]
    else:
        chosen = np.zeros((len(vector_of_row), dim), table.dtype)
    flat = pa.Array.from_buffers(number, chosen.size, [None, pa.py_buffer(np.ascontiguousarray(chosen))])
    column = pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=pa.array(null) if null.any() else None)
    return write_batch("embeddings", column, errors)


def sparse_reply(rows: Sequence[Any | None], errors: Sequence[str | None] | None) -> pa.Buffer:
    """One batch with the column `sparse_embeddings`. rows: (indices uint32, values float32) of each, None for null."""
    counts = np.array([0 if row is None else len(row[0]) for row in rows], np.int64)
    present = [row for row in rows if row is not None]
    indices = np.concatenate([row[0] for row in present]) if present else np.zeros(0, np.uint32)
    values = np.concatenate([row[1] for row in present]) if present else np.zeros(0, np.float32)
    return flat_sparse_reply(counts, indices, values, np.array([row is None for row in rows], bool), errors)


def flat_sparse_reply(
    counts: np.ndarray, indices: np.ndarray, values: np.ndarray, null: np.ndarray, errors: Sequence[str | None] | None
) -> pa.Buffer:
    """As `sparse_reply`, with the entries of all rows concatenated.

    counts: [rows], how many entries each row has; indices, values: [sum of counts]; null: [rows] bool.
    """
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    items = pa.StructArray.from_arrays(
        [pa.array(indices.astype(np.uint32)), pa.array(values.astype(np.float32))], fields=list(SPARSE_ITEM)
    )
    kind = pa.list_(pa.field("item", SPARSE_ITEM, nullable=False))
    column = pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=pa.array(null) if null.any() else None)
    return write_batch("sparse_embeddings", column, errors)


def tokens_reply(
    rows: Sequence[np.ndarray | None], empty: np.ndarray, errors: Sequence[str | None] | None
) -> pa.Buffer:
    """One batch with the column `token_embeddings`. rows: [tokens, dim] of each, None for null; empty: [0, dim]."""
    flat = np.ascontiguousarray(np.concatenate([*(row for row in rows if row is not None), empty]))
    number = pa.from_numpy_dtype(flat.dtype)
    values = pa.Array.from_buffers(number, flat.size, [None, pa.py_buffer(flat)])
    vector = pa.list_(pa.field("item", number, nullable=False), flat.shape[1])
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)]).astype(np.int32)
    null = np.array([row is None for row in rows], bool)
    column = pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.FixedSizeListArray.from_arrays(values, type=vector),
        type=pa.list_(pa.field("item", vector, nullable=False)),
        mask=pa.array(null) if null.any() else None,
    )
    return write_batch("token_embeddings", column, errors)


def write_batch(name: str, column: pa.Array, errors: Sequence[str | None] | None) -> pa.Buffer:
    columns, fields = [column], [pa.field(name, column.type)]
    if errors is not None:
        columns.append(pa.array(errors, pa.string()))
        fields.append(pa.field("error", pa.string()))
    batch = pa.record_batch(columns, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=WRITE_LZ4) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def reply_message(ipc: pa.Buffer, metadata: Message | None = None) -> bytes:
    """EmbedArrowResponse and its like, whose `arrow_ipc` is field 1 and `metadata` field 2. Put together
    here, the vectors are copied once and not three times."""
    behind = vectors.length_delimited(2, metadata.SerializeToString()) if metadata else b""
    return b"".join((vectors.front(1, ipc.size), ipc, behind))
