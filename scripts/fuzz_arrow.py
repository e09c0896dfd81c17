"""Damage to Arrow IPC streams in requests, for scripts/fuzz.py; and small streams that expand to large ones.

Each function takes a choice (random.Random), and the same choice does the same damage.
"""

import random
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import lz4.frame
import numpy as np
import pyarrow as pa

from appliance.wire.vectors import length_delimited
from scripts.fuzz_protobuf import EVERYWHERE, LIES, cut, damaged, fields, flipped, number_at
from testing.arrows import ipc

ROWS = 13  # of a valid request; in batches of 5, the last of which has 3
WORDS = (0, 1, -1, 2, 5, 8, 12, 13, 64, 127, -128, 2**15, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
CONTINUES = b"\xff\xff\xff\xff"


class Part(NamedTuple):
    """One message of an IPC stream."""

    metadata: bytes
    body: bytes


def parts_of(raw: bytes) -> list[Part]:
    parts, at = [], 0
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
    for message in reader:
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        body = message.body.size if message.body else 0
        parts.append(Part(raw[at + 8 : at + 8 + size], raw[at + 8 + size : at + 8 + size + body]))
        at += 8 + size + body
    return parts


def joined(parts: Sequence[Part]) -> bytes:
    return (
        b"".join(CONTINUES + struct.pack("<i", len(about)) + about + body for about, body in parts)
        + CONTINUES
        + bytes(4)
    )


def rewritten(choice: random.Random, raw: bytes, widths: Sequence[int] = (1, 4, 4, 8, 8)) -> bytes:
    """Some aligned numbers of 1, 4 or 8 bytes say something else: counts, offsets, lengths, types, bitmaps."""
    changed = bytearray(raw)
    for _ in range(choice.choice((1, 1, 2, 4)) if len(raw) >= 8 else 0):
        width = choice.choice(widths)
        at = choice.randrange(len(raw) // width) * width
        before = int.from_bytes(raw[at : at + width], "little", signed=True)
        after = choice.choice((*WORDS, before + 1, before - 1, -before, before + 8, before * 2, choice.getrandbits(63)))
        changed[at : at + width] = (after % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(changed)


def counted(choice: random.Random, about: bytes) -> bytes:
    """The row count says something else wherever it stands, in the batch and in its columns."""
    false = choice.choice((0, 1, 4, 6, 12, 14, 1000, 2**31, 2**40, 2**63 - 1, 2**64 - 1))
    for rows in (ROWS, 5, 3):
        about = about.replace(struct.pack("<q", rows), struct.pack("<Q", false))
    return about


def stream_damaged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One IPC stream with one or two of its messages changed, lost, doubled, or under a false length."""
    parts = parts_of(raw)
    for _ in range(choice.choice((1, 1, 2))):
        at = choice.randrange(len(parts))
        about, body = parts[at]
        match choice.randrange(10):
            case 0 | 1:
                parts[at] = Part(rewritten(choice, about), body)
            case 2 | 3:
                parts[at] = Part(about, rewritten(choice, body))
            case 4:
                parts[at] = Part(about, flipped(choice, body, b""))
            case 5:
                parts = [Part(counted(choice, about), body) for about, body in parts]
            case 6:  # the plain length in front of a compressed buffer, or its first offsets
                parts[at] = Part(about, rewritten(choice, body[:64], (8,)) + body[64:])
            case 7:
                parts = choice.sample(parts, len(parts)) + parts[: choice.randrange(3)]
            case 8:
                halved, cut_off, doubled = (about, body[: len(body) // 2]), (about[:-8], body), (about, body * 2)
                parts[at] = Part(*choice.choice((halved, cut_off, doubled)))
            case 9:
                parts[at] = choice.choice(parts_of(other))
        parts = parts or parts_of(raw)
    stream = joined(parts)
    if choice.random() < 0.15:
        at = choice.choice((0, 4, 8))
        stream = stream[:at] + struct.pack("<i", choice.choice((0, -1, 7, 2**31 - 1, -(2**31)))) + stream[at + 4 :]
    return stream


def frame_damaged(choice: random.Random, raw: bytes) -> bytes:
    """An LZ4 frame that lies about its content, is cut, is not alone, or has other flags."""
    frame = bytearray(lz4.frame.compress(raw, content_checksum=choice.random() < 0.5, store_size=True))
    match choice.randrange(5):
        case 0:
            frame[6:14] = struct.pack("<Q", choice.choice(LIES))
        case 1:
            frame[choice.randrange(min(16, len(frame)))] ^= 1 << choice.randrange(8)
        case 2:
            frame[15:19] = struct.pack("<I", choice.choice(LIES) % 2**32)
        case 3:
            frame += choice.choice((bytes(frame), b"\x50\x2a\x4d\x18\xff\xff\xff\x7f", bytes(90)))
        case 4:
            return flipped(choice, cut(choice, bytes(frame), b""), b"")
    return bytes(frame)


@cache
def bomb(kind: str) -> bytes:
    """Small streams that are large when expanded: some are refused for that, some for what they would answer."""
    million = 1_000_000
    match kind:
        case "nulls" | "dictionary" | "empty":
            blank = pa.py_buffer(bytes(4 * million + 4))
            valid = pa.py_buffer(bytes(million // 8)) if kind == "nulls" else None
            rows = pa.Array.from_buffers(pa.string(), million, [valid, blank, pa.py_buffer(b"")])
            few = pa.DictionaryArray.from_arrays(np.zeros(million, np.int8), pa.array(["river"]))
            return ipc(pa.table({"text": few if kind == "dictionary" else rows}), "zstd")
        case "one text":
            return ipc(pa.table({"text": ["a" * 50 * million]}), "zstd")
        case "frame":
            return lz4.frame.compress(bytes(400 * million))
    return ipc(pa.table({"text": ["a" * million] * 400}), "zstd" if kind == "many zstd" else "lz4")


BOMBS = ("nulls", "dictionary", "empty", "one text", "frame", "many zstd", "many lz4")
BOMB_SHARE = 0.002


def arrow_damaged(choice: random.Random, request: bytes, other: bytes) -> bytes:
    """An Arrow request with a damaged stream in it; some are damaged as protobuf, instead."""
    if choice.random() < 0.1:
        return damaged(choice, request, other)
    (target, raw, *rest), (_, another, *_) = (
        [each[field.begin : field.end] for field in fields(each)] for each in (request, other)
    )
    plain, second = (unframed(part[number_at(part, 1)[1] :]) for part in (raw, another))
    if choice.random() < 0.1:
        stream = choice.choice(EVERYWHERE)(choice, plain, second)
    else:
        stream = stream_damaged(choice, plain, second)
    if choice.random() < 0.1:
        stream = frame_damaged(choice, stream)
    return b"".join((target, length_delimited(2, stream), *rest))


def unframed(raw: bytes) -> bytes:
    plain: bytes = lz4.frame.decompress(raw) if raw[:4] == b"\x04\x22\x4d\x18" else raw
    return plain
