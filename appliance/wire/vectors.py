"""Vectors as protobuf packs them: a length, then float32, little endian. They never become Python floats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from google.protobuf.message import Message


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, content: bytes) -> bytes:
    """A protobuf field ``number`` whose content is bytes: a string, a message or packed numbers."""
    return front(number, len(content)) + content


def front(number: int, size: int) -> bytes:
    """What stands before the ``size`` bytes of such a field."""
    return varint(number << 3 | 2) + varint(size)


def pack(vector: np.ndarray) -> bytes:
    """[width] float32 as `repeated float` in field 1: `embeddings` of EmbedResponse and TokenEmbedding."""
    raw = np.ascontiguousarray(vector, "<f4").tobytes()
    return length_delimited(1, raw) if raw else b""


def unpack(raw: bytes) -> tuple[np.ndarray, bytes]:
    """Split a serialized EmbedResponse or TokenEmbedding: (its packed floats, [width] float32, a view; the rest).

    Raises: ValueError when it does not begin with floats (an empty vector, or an encoder with another order).
    A plain tuple: this runs once for each reply.
    """
    begin, end = first_field(raw)
    return np.frombuffer(raw, "<f4", count=(end - begin) // 4, offset=begin), raw[end:]


def unpack_all(raw: bytes) -> tuple[np.ndarray, bytes]:
    """Split a serialized EmbedAllResponse: ([tokens, width] float32; the rest).

    All TokenEmbeddings have the same size, so they are the rows of a table, and the same few bytes begin each row.
    Raises: ValueError when they are not.
    """
    begin, step = first_field(raw)
    front = begin + first_field(raw[begin:step])[0]
    count = 1
    while raw[count * step : count * step + front] == raw[:front]:
        count += 1
    table = np.frombuffer(raw, np.uint8, count=count * step).reshape(count, step)[:, front:]
    return np.ascontiguousarray(table).view("<f4"), raw[count * step :]


def first_field(raw: bytes) -> tuple[int, int]:
    """Where the content of the first field begins and ends. Raises: ValueError unless it is field 1 and of bytes."""
    if raw[:1] != b"\x0a":
        raise ValueError("the reply does not begin with its embeddings")
    length = shift = 0
    for at in range(1, min(6, len(raw))):
        length |= (raw[at] & 0x7F) << shift
        shift += 7
        if raw[at] < 0x80:
            return at + 1, at + 1 + length
    raise ValueError("the reply's embeddings have no length")


def parts_of(message: type[Message], raw: bytes, numbers: Mapping[int, int]) -> dict[int, bytes]:
    """The fields of a serialized ``message``, each as it stands in some other one. Raises: DecodeError.

    numbers: there, by the number here; all up to 15. Every field of the message has one, and its content is bytes: a
    message, a string or packed numbers. A hundred sparse values that are put from one message into another as objects
    take 50 us; this takes 20, with reading them there.
    """
    try:
        return renumbered(raw, numbers)
    except ValueError:  # of an encoder with other ways, or with fields that are not known here
        known = message.FromString(raw)
        known.DiscardUnknownFields()
        return renumbered(known.SerializeToString(), numbers)


def renumbered(raw: bytes, numbers: Mapping[int, int]) -> dict[int, bytes]:
    """As `parts_of`. Raises: ValueError for a field that is not in ``numbers``, or whose content is no bytes."""
    data, size = bytearray(raw), len(raw)
    parts: dict[int, bytes] = {}
    at = 0
    while at < size:
        begin, tag = at, data[at]
        if tag & 7 != 2 or (number := numbers.get(tag >> 3)) is None:
            raise ValueError(f"the message has a field with the tag {tag}")
        while at < size and data[at] == tag:
            data[at] = number << 3 | 2
            at += 1
            length, shift, ended = 0, 0, False
            while at < size and not ended:
                ended = data[at] < 0x80
                length |= (data[at] & 0x7F) << shift
                shift += 7
                at += 1
            at += length
        if at > size or not ended:
            raise ValueError("the message ends in the middle of a field")
        parts[tag >> 3] = parts.get(tag >> 3, b"") + data[begin:at]
    return parts
