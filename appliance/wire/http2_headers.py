"""Header blocks (HPACK, RFC 7541).

A server reads them with the table that its peer fills. A client allows no table. Where none is used the same headers
are the same bytes on every connection, so they are read and written once: that is a sixtieth of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder
from hpack.hpack import encode_integer

LARGEST_HEADERS = 2**17  # as HPACK counts them, with 32 bytes for each; more than that ends the connection
MOST_KNOWN_BLOCKS = 64
LARGEST_KNOWN_BLOCK = 64  # bytes: as many fields, or fewer
MOST_SHARED_BLOCKS = 256  # that mean the same on all connections
LARGEST_SHARED_BLOCK = 1024  # bytes
MOST_SHARED_FIELDS = 2048  # of such blocks
INDEXED_FIELD = 0x80  # the first bit of a header field that is in the table (6.1)
LONG_INDEXED = 0xFF  # its place in the table takes another byte
LITERAL_INDEXED = 0x40  # the bit of a header field that the table shall keep (6.2.1)
NEVER_INDEXED = b"\x10"  # before one that no table keeps, and its name as it is (6.2.3)
TABLE_SIZE, TABLE_SIZE_MASK = 0x20, 0xE0  # the first bits of a new size of the table (6.3)
EMPTY_TABLE = bytes([TABLE_SIZE])  # before the first block of who uses none
STATUS_200 = b"\x88"  # the field of the static table
Headers = list[tuple[str, str]]
HeaderTuple = tuple[tuple[str, str], ...]


class HeaderDecoder:
    """The state of one connection."""

    def __init__(self) -> None:
        self.decoder = Decoder(max_header_list_size=LARGEST_HEADERS)
        self.known_blocks: dict[bytes, HeaderTuple] = {}

    def decoded(self, block: bytes) -> HeaderTuple:
        """The headers of a block. One of indexed fields alone, as it is from a client's second call on, leaves the
        table as it is: it means the same until another block changes that. Raises: HPACKError, IndexError."""
        known = self.known_blocks.get(block)
        if known is not None:
            return known
        table = self.decoder.header_table.dynamic_entries
        size, newest = len(table), table[0] if table else None
        headers = tuple((text(key), text(value)) for key, value in self.decoder.decode(block, raw=True))
        table = self.decoder.header_table.dynamic_entries
        if size != len(table) or newest is not (table[0] if table else None):  # an equal one may have been added
            self.known_blocks.clear()
        small = len(block) <= LARGEST_KNOWN_BLOCK
        if small and min(block, default=0) >= INDEXED_FIELD and len(self.known_blocks) < MOST_KNOWN_BLOCKS:
            self.known_blocks[block] = headers
        return headers


def text(raw: bytes | str) -> str:
    """Header values are bytes; what is not UTF-8 is kept as it is by the escape that Python has for it."""
    return raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")


@lru_cache(1024)
def response_block(headers: HeaderTuple) -> bytes:
    """The first is `:status`."""
    (_, status), *others = headers
    return (STATUS_200 if status == "200" else never_indexed([(":status", status)])) + never_indexed(others)


@lru_cache(1024)
def block_of(headers: HeaderTuple) -> bytes:
    return never_indexed(headers)


def changes_table_size(block: bytes) -> bool:
    return bool(block) and block[0] & TABLE_SIZE_MASK == TABLE_SIZE


@lru_cache(MOST_SHARED_BLOCKS)
def headers_without_table(block: bytes) -> Headers:
    """Of a block that uses no table. Nobody may change them. Raises: HPACKError.

    Replicas tell of each call how long it took, so that a block is another one and most of its fields are known: to cut
    it into fields and to look these up takes a tenth of decoding it (27 us for 11 fields).
    """
    fields = cut(block)
    return decoded_without_table(block) if fields is None else [header_without_table(field) for field in fields]


@lru_cache(MOST_SHARED_FIELDS)
def header_without_table(field: bytes) -> tuple[str, str]:
    """Raises: HPACKError."""
    (header,) = decoded_without_table(field)
    return header


def decoded_without_table(block: bytes) -> Headers:
    """Raises: HPACKError."""
    decoder = Decoder()
    decoder.header_table_size = 0
    return plain_headers(decoder, block)


def cut(block: bytes) -> list[bytes] | None:
    """The header fields of a block, which are not read (6). None where one is of another kind, or longer than this
    cuts."""
    fields: list[bytes] = []
    at = 0
    try:
        while at < len(block):
            end = field_end(block, at)
            fields.append(block[at:end])
            at = end
    except IndexError:
        return None
    return fields if at == len(block) else None


def field_end(block: bytes, at: int) -> int:
    """Behind the end of the block where the field is none, or an integer in it takes several bytes. Raises:
    IndexError."""
    first = block[at]
    if first & INDEXED_FIELD:
        return at + 1 if first < LONG_INDEXED else sys.maxsize
    if first & TABLE_SIZE_MASK == TABLE_SIZE:
        return sys.maxsize
    mask = 0x3F if first & LITERAL_INDEXED else 0x0F
    name = first & mask
    if name == mask:
        return sys.maxsize
    return string_end(block, at + 1 if name else string_end(block, at + 1))


def string_end(block: bytes, at: int) -> int:
    size = block[at] & 0x7F  # without the bit of Huffman's code (5.2)
    return at + 1 + size if size < 0x7F else sys.maxsize


def plain_headers(decoder: Decoder, block: bytes) -> Headers:
    """Raises: HPACKError."""
    return [(str(key), str(value)) for key, value in decoder.decode(block)]


def never_indexed(headers: Iterable[tuple[str, str]]) -> bytes:
    """The block of headers for which no table is asked: a fifth of the time that the encoder takes (5 us a header)."""
    return b"".join([NEVER_INDEXED + string_literal(raw(key)) + string_literal(raw(value)) for key, value in headers])


def raw(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")  # what came and was not UTF-8 goes on as it came


def string_literal(text: bytes) -> bytes:
    """Without Huffman's code (5.2)."""
    size = len(text)
    return (bytes((size,)) if size < 0x7F else bytes(encode_integer(size, 7))) + text
