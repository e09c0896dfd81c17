"""How large an Arrow IPC stream would be when expanded, by the sizes that its own messages state.

Nothing is decompressed for that, so a bomb is refused before it expands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flatbuffers
import numpy as np
import pyarrow as pa

from appliance.core.problems import Kind, Problem

RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # MessageHeader of Arrow's Message.fbs
SCHEMA_FACTOR = 200  # bytes in memory for a byte of a schema whose fields refer to the same children again and again


class Expansion(NamedTuple):
    """size: bytes when expanded."""

    size: int
    rows: int


def too_large(limit: int) -> Problem:
    return Problem(
        Kind.EXHAUSTED, "TOO_LARGE", f"The Arrow data would expand to over {limit} bytes: send it in smaller batches"
    )


def stated_size(raw: bytes, limit: int, row_bytes: int) -> Expansion:
    """What all batches of an IPC stream state to be when expanded. Only the metadata of the messages are read.

    Raises: Problem when that is more than ``limit`` bytes, ``row_bytes`` for each row included.
    """
    total, rows = 0, 0
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return Expansion(total, rows)
        if message.type in ("record batch", "dictionary"):
            batch = batch_size(message.metadata.to_pybytes(), message.body)
            total += batch.size
            rows += batch.rows
        elif message.type == "schema":
            total += SCHEMA_FACTOR * message.metadata.size
        if total + row_bytes * rows > limit:
            raise too_large(limit)


def batch_size(metadata: bytes, body: pa.Buffer | None) -> Expansion:
    """One batch after decompression (Arrow's Message.fbs, read by field number)."""
    message = root(metadata)
    header = table(message, 2)
    if body is None or header is None:
        return Expansion(0, 0)
    if number(message, 1, flatbuffers.number_types.Uint8Flags) == DICTIONARY_BATCH:
        header = table(header, 1)
    if header is None:
        return Expansion(0, 0)
    compressed = field_offset(header, 3) != 0
    start, count = vector(header, 2)
    buffers = np.frombuffer(metadata, "<i8", count=2 * count, offset=start).reshape(count, 2)
    rows = number(header, 0, flatbuffers.number_types.Int64Flags)
    if rows < 0:
        raise ValueError("a batch has a negative number of rows")
    size = sum(buffer_size(body, int(offset), int(length), compressed) for offset, length in buffers)
    return Expansion(size, rows)


def buffer_size(body: pa.Buffer, offset: int, length: int, compressed: bool) -> int:
    """Bytes of a buffer when expanded. A compressed one begins with its plain length, or with -1: not compressed."""
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
