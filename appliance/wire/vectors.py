"""Vectors as protobuf packs them: float32, little endian, one length in front. They never become Python floats."""

from __future__ import annotations

import numpy as np


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, content: bytes) -> bytes:
    """A protobuf field ``number`` whose content is bytes: a string, a message or packed numbers."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def pack(vector: np.ndarray) -> bytes:
    """[width] float32 as `repeated float` in field 1: `embeddings` of EmbedResponse and TokenEmbedding."""
    raw = np.ascontiguousarray(vector, "<f4").tobytes()
    return length_delimited(1, raw) if raw else b""


def unpack(raw: bytes) -> np.ndarray:
    """The packed floats of field 1 of a serialized EmbedResponse, as a view on its bytes; [width] float32.

    Raises: ValueError when the reply does not begin with them (an empty vector, or another encoder's order).
    """
    if raw[:1] != b"\x0a":
        raise ValueError("the reply does not begin with its embeddings")
    length = shift = 0
    for at in range(1, 6):
        length |= (raw[at] & 0x7F) << shift
        shift += 7
        if raw[at] < 0x80:
            return np.frombuffer(raw, "<f4", count=length // 4, offset=at + 1)
    raise ValueError("the reply's embeddings have no length")
