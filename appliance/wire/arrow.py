"""Arrow IPC in and out: texts of any string type over all record batches, vectors back in one batch.

Nothing is decompressed before the sizes that the message itself states have been added up: a bomb is refused first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from appliance.core.budget import READ, ROW
from appliance.core.problems import Kind, Problem, invalid

LZ4_MAGIC = b"\x04\x22\x4d\x18"
PIECE_BYTES = 4 * 1024 * 1024
RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # MessageHeader of Arrow's Message.fbs
SCHEMA_FACTOR = 200  # bytes in memory for a byte of a schema whose fields refer to the same children again and again
ROW_BYTES = 320  # what a row costs on its way, however small: 1.8 GB for 5 million equal sparse rows
STRING_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
SPARSE_ITEM = pa.struct([pa.field("index", pa.uint32(), False), pa.field("value", pa.float32(), False)])


@dataclass(frozen=True)
class Rows:
    """The rows of a request. texts: the distinct ones, UTF-8; text_of_row: [rows], an index of them, -1 for null."""

    texts: list[bytes]
    text_of_row: np.ndarray

    def __len__(self) -> int:
        return len(self.text_of_row)


def too_large(limit: int) -> Problem:
    return Problem(
        Kind.EXHAUSTED, "TOO_LARGE", f"The Arrow data would expand to over {limit} bytes: send it in smaller batches"
    )


def book_nothing(size: int) -> None:
    """For `read_rows` where memory has no budget."""


def read_rows(raw: bytes, limit: int, row_bytes: int = ROW_BYTES, book: Callable[[int], object] = book_nothing) -> Rows:
    """The rows of an IPC stream. limit: bytes that it may have when expanded; row_bytes: what a row counts for.

    book: called with the bytes that reading takes, before they are taken; may raise a Problem.
    Raises: Problem for what is no Arrow stream, has no string column, or is larger.
    """
    try:
        column = validated(text_column(read_table(raw, limit, row_bytes, book)))
        return distinct(column, limit)
    except (pa.ArrowException, ValueError, IndexError, OSError, RuntimeError) as error:
        raise invalid(f"arrow_ipc is not a readable Arrow IPC stream: {error}") from error


def validated(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Arrow uses offsets and indices as it read them: a wrong one ends the process."""
    column.validate(full=True)
    return column


def read_column(raw: bytes, limit: int, book: Callable[[int], object] = book_nothing) -> pa.Array:
    """The texts of an IPC stream as one large_string array, nulls in place. Raises: Problem as `read_rows`, also when
    written out row by row they have more than ``limit`` bytes."""
    rows = read_rows(raw, limit, row_bytes=0, book=book)
    sizes = np.array([len(text) for text in rows.texts], np.int64)
    if int(sizes[rows.text_of_row[rows.text_of_row >= 0]].sum()) > limit:
        raise too_large(limit)
    try:
        unique = pa.array(rows.texts, pa.large_binary()).cast(pa.large_string())
    except pa.ArrowException as error:
        raise invalid(f"The texts are not UTF-8: {error}") from error
    return unique.take(pa.array(rows.text_of_row, mask=rows.text_of_row < 0))


def is_large(raw: bytes, limit: int) -> bool:
    """Whether an IPC stream would expand to more than ``limit`` bytes. Nothing is expanded to find out."""
    if raw[:4] == LZ4_MAGIC:
        return True  # its content has no stated size
    try:
        refuse_bomb(raw, limit, row_bytes=0)
    except Problem:
        return True
    except (pa.ArrowException, ValueError, IndexError, OSError, RuntimeError):
        return False  # no Arrow: refused when it is read
    return False


def distinct(column: pa.ChunkedArray, limit: int) -> Rows:
    """Each distinct text once. Neither a dictionary nor a view is written out row by row: a megabyte to which a
    million rows refer stays one megabyte."""
    if pa.types.is_dictionary(column.type):
        whole = one_array(column.unify_dictionaries())
        values = distinct(pa.chunked_array([whole.dictionary]), limit)
        value_of_row = np.asarray(whole.indices.cast(pa.int64()).fill_null(-1))
        text_of_value = np.append(values.text_of_row, -1)  # the last one is for -1, a null row
        return only_used(values.texts, text_of_value[value_of_row])
    if pa.types.is_string_view(column.type):
        column = pa.chunked_array([with_empty_nulls(chunk) for chunk in column.chunks], column.type)
        if sum(map(written_out_bytes, column.chunks)) > limit:
            raise too_large(limit)
    column = pc.cast(column, pa.large_string())
    encoded = one_array(column).dictionary_encode()
    del column
    unique = encoded.dictionary.cast(pa.large_binary())
    return Rows(unique.to_pylist(), np.asarray(encoded.indices.fill_null(-1)))


def only_used(texts: list[bytes], text_of_row: np.ndarray) -> Rows:
    """Without the values of a dictionary that no row refers to: they were not asked for, and may be no valid texts."""
    is_text = text_of_row >= 0
    used, new_index = np.unique(text_of_row[is_text], return_inverse=True)
    text_of_row = text_of_row.copy()
    text_of_row[is_text] = new_index
    return Rows([texts[index] for index in used.tolist()], text_of_row)


def views_of(chunk: pa.Array) -> np.ndarray:
    """[rows, 4] int32: the views of a string_view array, the length of its text first in each."""
    views = np.frombuffer(chunk.buffers()[1] or b"", np.int32, count=4 * (chunk.offset + len(chunk))).reshape(-1, 4)
    return views[chunk.offset :]


def with_empty_nulls(chunk: pa.Array) -> pa.Array:
    """With empty views for nulls. The view of a null may point anywhere: validation does not look at it, and Arrow's
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
    size, rows = refuse_bomb(raw, limit, row_bytes)
    book(max(0, READ * size + ROW * rows - booked))
    with pa.ipc.open_stream(raw) as reader:
        return reader.read_all()


def unpack_frame(raw: bytes, limit: int, book: Callable[[int], object]) -> tuple[bytes, int]:
    """(the content of one LZ4 frame, how much of its reading is booked already).

    A frame that states its size is booked as a whole, another one piece by piece.
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
        return plain, READ * stated
    pieces, size = [frame.decompress(raw, max_length=PIECE_BYTES)], 0
    while pieces[-1]:
        size += len(pieces[-1])
        if size > limit:
            raise too_large(limit)
        book(2 * len(pieces[-1]))  # the pieces, and all of them in one
        pieces.append(b"" if frame.eof else frame.decompress(b"", max_length=PIECE_BYTES))
    return b"".join(pieces), 0


def refuse_bomb(raw: bytes, limit: int, row_bytes: int) -> tuple[int, int]:
    """(bytes, rows): what all batches state to be when expanded. Reads only the messages' metadata."""
    total, rows = 0, 0
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return total, rows
        if message.type in ("record batch", "dictionary"):
            size, more = expanded(message.metadata.to_pybytes(), message.body)
            total += size
            rows += more
        elif message.type == "schema":
            total += SCHEMA_FACTOR * message.metadata.size
        if total + row_bytes * rows > limit:
            raise too_large(limit)


def expanded(metadata: bytes, body: pa.Buffer | None) -> tuple[int, int]:
    """(bytes, rows) of one batch after decompression (Arrow's Message.fbs, read by field number)."""
    message = root(metadata)
    header = table(message, 2)
    if body is None or header is None:
        return 0, 0
    if number(message, 1, flatbuffers.number_types.Uint8Flags) == DICTIONARY_BATCH:
        header = table(header, 1)
    if header is None:
        return 0, 0
    compressed = field_offset(header, 3) != 0
    start, count = vector(header, 2)
    buffers = np.frombuffer(metadata, "<i8", count=2 * count, offset=start).reshape(count, 2)
    rows = number(header, 0, flatbuffers.number_types.Int64Flags)
    if rows < 0:
        raise ValueError("a batch has a negative number of rows")
    return sum(buffer_size(body, int(offset), int(length), compressed) for offset, length in buffers), rows


def buffer_size(body: pa.Buffer, offset: int, length: int, compressed: bool) -> int:
    """A compressed buffer begins with its plain length; -1 says that it was left plain."""
    if length < 0 or (length and (offset < 0 or offset + length > body.size)):
        raise ValueError("a buffer lies outside its message")
    if not compressed or length < 8:
        return length
    plain = int.from_bytes(body.slice(offset, 8).to_pybytes(), "little", signed=True)
    return length - 8 if plain == -1 else max(plain, 0)


def root(metadata: bytes) -> Any:
    start = flatbuffers.encode.Get(flatbuffers.packer.uoffset, metadata, 0)
    return flatbuffers.table.Table(bytearray(metadata), start)


def field_offset(parent: Any, field: int) -> int:
    return int(parent.Offset(4 + 2 * field))


def table(parent: Any, field: int) -> Any | None:
    offset = field_offset(parent, field)
    return flatbuffers.table.Table(parent.Bytes, parent.Indirect(offset + parent.Pos)) if offset else None


def number(parent: Any, field: int, flags: Any) -> int:
    offset = field_offset(parent, field)
    return int(parent.Get(flags, offset + parent.Pos)) if offset else 0


def vector(parent: Any, field: int) -> tuple[int, int]:
    """(position of the first element, count)."""
    offset = field_offset(parent, field)
    return (int(parent.Vector(offset)), int(parent.VectorLen(offset))) if offset else (0, 0)


def text_column(rows: pa.Table) -> pa.ChunkedArray:
    """The column `text`, else the first string column."""
    schema = rows.schema
    named = [at for at, name in enumerate(schema.names) if name == "text" and is_text(schema.field(at).type)]
    strings = [at for at in range(len(schema)) if is_text(schema.field(at).type)]
    if "text" in schema.names and not named:
        raise invalid(f'Column "text" must hold strings, not {schema.field("text").type}')
    if not strings:
        raise invalid(
            f"No string column among {', '.join(map(str, schema.names)) or 'no columns'}: send one named text"
        )
    return rows.column((named or strings)[0])


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(matches(kind) for matches in STRING_TYPES)


# -- replies ----------------------------------------------------------------------------------------------------------


def dense_reply(vectors: np.ndarray, vector_of_row: np.ndarray, errors: Sequence[str | None] | None) -> bytes:
    """One batch, `embeddings`: row i is ``vectors[vector_of_row[i]]``, or null where that is -1.

    vectors: [texts, dim] float32. errors: one a row for the column `error`, or None for no such column.
    """
    dim = vectors.shape[1]
    kind = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
    null = vector_of_row < 0
    if len(vectors):
        chosen = vectors[np.where(null, 0, vector_of_row)]
    else:
        chosen = np.zeros((len(vector_of_row), dim), np.float32)
    flat = pa.Array.from_buffers(pa.float32(), chosen.size, [None, pa.py_buffer(np.ascontiguousarray(chosen))])
    column = pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=pa.array(null) if null.any() else None)
    return write_batch("embeddings", column, errors)


def sparse_reply(rows: Sequence[Any | None], errors: Sequence[str | None] | None) -> bytes:
    """One batch, `sparse_embeddings`: for each row (indices uint32, values float32), or None for null."""
    counts = np.array([0 if row is None else len(row[0]) for row in rows], np.int64)
    present = [row for row in rows if row is not None]
    indices = np.concatenate([row[0] for row in present]) if present else np.zeros(0, np.uint32)
    values = np.concatenate([row[1] for row in present]) if present else np.zeros(0, np.float32)
    return flat_sparse_reply(counts, indices, values, np.array([row is None for row in rows], bool), errors)


def flat_sparse_reply(
    counts: np.ndarray, indices: np.ndarray, values: np.ndarray, null: np.ndarray, errors: Sequence[str | None] | None
) -> bytes:
    """As `sparse_reply`, the entries of all rows one behind the other.

    counts: [rows], the entries of each; indices, values: [sum of counts]; null: [rows] bool.
    """
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    items = pa.StructArray.from_arrays(
        [pa.array(indices.astype(np.uint32)), pa.array(values.astype(np.float32))], fields=list(SPARSE_ITEM)
    )
    kind = pa.list_(pa.field("item", SPARSE_ITEM, nullable=False))
    column = pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=pa.array(null) if null.any() else None)
    return write_batch("sparse_embeddings", column, errors)


def write_batch(name: str, column: pa.Array, errors: Sequence[str | None] | None) -> bytes:
    columns, fields = [column], [pa.field(name, column.type)]
    if errors is not None:
        columns.append(pa.array(errors, pa.string()))
        fields.append(pa.field("error", pa.string()))
    batch = pa.record_batch(columns, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
