"""What a cached embedding is known by: the fingerprint of all that decides a vector, the options, and the text's bytes.

Theory of operation. A `Fingerprint` has parts, each a digest or a word: weights, tokenizer, pooling, engine and so on.
Two instances with equal parts give equal vectors and share what is cached; one other bit in a part is another
fingerprint, and so is another key. A key is a digest of fingerprint, scope, task, options and text; every part goes in
behind its length, so that no two sequences of parts are the same bytes. An entry has its key in it, and a checksum:
what is not the entry of the key that was asked for, whole and unchanged, is no entry.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

KEY_BYTES = 20  # nobody finds two texts with one key by trying: 2^80 of them
FORMAT = 1  # of entries; another number is set aside
HEADER = struct.Struct(f"<BxxxI{KEY_BYTES}sQII")  # format, checksum, key, time in ms, characters, tokens
CHECKED_FROM = 8  # the checksum is over what follows it


class Task(StrEnum):
    """What is computed; the name of the unary RPC."""

    DENSE = "Embed"
    SPARSE = "EmbedSparse"


TASKS = frozenset(Task)


@dataclass(frozen=True)
class Fingerprint:
    """All that decides the vectors of an instance, by name; sorted."""

    parts: tuple[tuple[str, str], ...]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.blake2b(packed(word for part in self.parts for word in part), digest_size=16).hexdigest()

    def differing(self, other: Fingerprint) -> list[str]:
        """The names of the parts that are not the same in both."""
        one, two = dict(self.parts), dict(other.parts)
        return sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))


def packed(words: Iterable[str]) -> bytes:
    """Words one after the other, each behind its length."""
    encoded = [word.encode("utf-8", "surrogatepass") for word in words]
    return b"".join(len(word).to_bytes(8, "little") + word for word in encoded)


def keys_for(fingerprint: str, scope: str, task: str, options: bytes) -> Callable[[bytes], bytes]:
    """What makes the key of a text from its bytes (1 us). scope: empty, or whose entries these are."""
    begun = hashlib.blake2b(packed((fingerprint, scope, task)), digest_size=KEY_BYTES)
    begun.update(len(options).to_bytes(8, "little") + options)

    def key_of(text: bytes) -> bytes:
        digest = begun.copy()
        digest.update(text)
        return digest.digest()

    return key_of


class CachedEmbedding(NamedTuple):
    """One cached answer. at_ms: when it was computed, since 1970; chars, tokens: what it cost, as the replica counted.

    vector: dense, float32, little endian; sparse, the indices as uint32 and then as many values as float32.
    """

    key: bytes
    at_ms: int
    chars: int
    tokens: int
    vector: bytes

    def packed(self) -> bytes:
        head = HEADER.pack(FORMAT, 0, self.key, self.at_ms, self.chars, self.tokens)
        checksum = zlib.crc32(self.vector, zlib.crc32(head[CHECKED_FROM:]))
        return HEADER.pack(FORMAT, checksum, self.key, self.at_ms, self.chars, self.tokens) + self.vector


class Damaged(ValueError):
    """Stored bytes that are not the entry of their key."""


def unpacked(key: bytes, raw: bytes) -> CachedEmbedding:
    """The entry of ``key``. Raises: Damaged."""
    if len(raw) < HEADER.size:
        raise Damaged("it is cut off")
    number, checksum, own_key, at_ms, chars, tokens = HEADER.unpack_from(raw)
    if number != FORMAT or zlib.crc32(memoryview(raw)[CHECKED_FROM:]) != checksum:
        raise Damaged("its checksum is wrong")
    if own_key != key:
        raise Damaged("it is the entry of another key")
    return CachedEmbedding(key, at_ms, chars, tokens, raw[HEADER.size :])


class Purge(NamedTuple):
    """What was computed in this time is not used any more. fingerprint: of its entries; empty: all entries. Times are
    since 1970; why: in words."""

    fingerprint: str
    since_ms: int
    until_ms: int
    why: str = ""


def is_purged(fingerprint: str, at_ms: int, purges: Sequence[Purge], now_ms: int) -> bool:
    """Also where it was computed later than now: the clock was set back since."""
    return any(
        each.fingerprint in ("", fingerprint) and (each.since_ms <= at_ms <= each.until_ms or at_ms > now_ms)
        for each in purges
    )
