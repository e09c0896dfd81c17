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
