"""Damage to protobuf messages, for scripts/fuzz.py.

Each function takes a choice (random.Random), a valid message and another one; the same choice does the same damage.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from appliance.wire.vectors import length_delimited, varint

LIES = (0, 1, 127, 128, 2**14, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
BAD_TEXTS = (
    *(b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfe\x00", b"\x80" * 9, b"\xf4\x90\x80\x80", b"ok \xe6\x9d", b"\x00" * 50),
    *(b" \t\r\n" * 40, b"a" + "\u0301".encode() * 4000, "\u202e\u2066x".encode(), "🚀".encode() * 3000),
    *(b"word " * 30_000, b"[UNK][CLS][SEP]<s></s>", b"", b"%s%n{0}${jndi:x}\x1b[2J", b"minilm\n", b"../../etc/passwd"),
)
MOST_FIELDS = 300  # that are read of one message
Damage = Callable[[random.Random, bytes, bytes], bytes]  # (choice, a message, another one)


class Field(NamedTuple):
    """Where the tag of a field, its content and the next field begin."""

    begin: int
    content: int
    end: int


class Varint(NamedTuple):
    value: int
    end: int


def number_at(raw: bytes, at: int) -> Varint:
    """The varint that begins at ``at``. Raises: IndexError."""
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if raw[at - 1] < 0x80:
            return Varint(value, at)


def fields(raw: bytes) -> list[Field]:
    """The fields of a message, as far as they can be read."""
    spans: list[Field] = []
    at = 0
    try:
        while at < len(raw) and len(spans) < MOST_FIELDS:
            tag, content = number_at(raw, at)
            if tag & 7 == 2:
                length, content = number_at(raw, content)
                end = content + length
            else:
                end = content + {1: 8, 5: 4}[tag & 7] if tag & 7 else number_at(raw, content)[1]
            if end > len(raw):
                break
            spans.append(Field(at, content, end))
            at = end
    except (IndexError, KeyError):
        pass
    return spans


def length_delimited_fields(raw: bytes) -> list[Field]:
    return [field for field in fields(raw) if raw[field.begin] & 7 == 2]


def flipped(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    damaged = bytearray(raw or b"\x00")
    for _ in range(choice.choice((1, 1, 2, 8))):
        damaged[choice.randrange(len(damaged))] ^= 1 << choice.randrange(8)
    return bytes(damaged)


def cut(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return raw[: choice.randrange(len(raw) + 1)]


def spliced(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return raw[: choice.randrange(len(raw) + 1)] + other[choice.randrange(len(other) + 1) :]


def inserted(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    at = choice.randrange(len(raw) + 1)
    return raw[:at] + choice.randbytes(choice.choice((1, 3, 40, 5000))) + raw[at:]


def lied(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One length or number says something else, also with more bytes than a varint may have."""
    spans = fields(raw)
    if not spans:
        return varint(choice.choice(LIES)) + raw
    begin, content, end = choice.choice(spans)
    tag, after = number_at(raw, begin)
    false = choice.choice((*LIES, end - content + 1, max(0, end - content - 1)))
    written = choice.choice((varint(false), varint(false), b"\xff" * 10 + b"\x01", b"\x80" * 12))
    return raw[:after] + written + (raw[content:] if tag & 7 == 2 else raw[end:])


def retagged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Another wire type, or another field number, for one field."""
    spans = fields(raw)
    if not spans:
        return flipped(choice, raw, other)
    begin = choice.choice(spans).begin
    tag, after = number_at(raw, begin)
    kind = tag & ~7 | choice.randrange(8)
    another = choice.choice((0, 1, 2, 3, 15, 19_000, 2**29 - 1, 2**32)) << 3 | tag & 7
    return raw[:begin] + varint(choice.choice((kind, another))) + raw[after:]


def repeated(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    spans = fields(raw)
    if not spans:
        return raw + other
    begin, _, end = choice.choice(spans)
    times = min(choice.choice((1, 2, 40, 5000)), 300_000 // (end - begin))
    return raw + raw[begin:end] * times


def shuffled(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Fields in another order, some missing, some of another message."""
    parts = [raw[begin:end] for begin, _, end in fields(raw)] + [other[begin:end] for begin, _, end in fields(other)]
    return b"".join(choice.sample(parts, choice.randrange(len(parts) + 1)))


def deep(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    depth, number = choice.choice((5, 99, 101, 1000)), choice.choice((1, 2, 7))
    if choice.random() < 0.5:
        return raw + varint(number << 3 | 3) * depth * 20 + varint(number << 3 | 4) * choice.choice((0, depth * 20))
    for _ in range(depth):
        raw = length_delimited(number, raw)
    return raw


def many(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """One field very often: empty, packed, or unknown."""
    number, count = choice.choice((1, 2, 3, 4, 6, 500)), choice.choice((100, 10_000, 200_000))
    small = choice.choice((b"\x00", b"\x01a", b"\x02\x08\x01"))
    if choice.random() < 0.5:
        return raw + length_delimited(number, choice.choice((b"\x05", b"\xff\x01", b"\xff\xff\xff\xff\x0f")) * count)
    return raw + (varint(number << 3 | 2) + small) * count


def worded(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """A text that is not UTF-8, or an odd one, under a right length."""
    spans = length_delimited_fields(raw)
    if not spans:
        return length_delimited(1, choice.choice(BAD_TEXTS))
    begin, _, end = choice.choice(spans)
    return raw[: number_at(raw, begin)[1]] + varint(len(bad := choice.choice(BAD_TEXTS))) + bad + raw[end:]


def noise(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    return choice.randbytes(choice.choice((0, 1, 2, 30, 3000)))


def within(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    """Damage inside of one field, whose length then fits: only the replica's own parser meets it."""
    spans = length_delimited_fields(raw)
    if not spans:
        return flipped(choice, raw, other)
    begin, content, end = choice.choice(spans)
    inner = damaged(choice, raw[content:end], other)
    return raw[: number_at(raw, begin)[1]] + varint(len(inner)) + inner + raw[end:]


EVERYWHERE: tuple[Damage, ...] = (flipped, cut, spliced, inserted, lied, retagged, repeated, shuffled, worded, noise)
DAMAGES: tuple[Damage, ...] = (*EVERYWHERE, lied, retagged, deep, many, *(within,) * 8)


def damaged(choice: random.Random, raw: bytes, other: bytes) -> bytes:
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        raw = choice.choice(DAMAGES)(choice, raw, other)
    return raw[:2_000_000]
