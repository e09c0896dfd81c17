"""The header blocks of the calls on one connection, as a server reads and writes them (HPACK, RFC 7541).

Reading keeps the table that the peer fills. Writing uses none: the same headers are the same bytes on every connection.
"""

from __future__ import annotations

from functools import lru_cache

from hpack import Decoder

from appliance.wire.http2 import INDEXED_FIELD, never_indexed

LARGEST_HEADERS = 2**17  # as HPACK counts them, with 32 bytes for each; more than that ends the connection
MOST_KNOWN_BLOCKS = 64
LARGEST_KNOWN_BLOCK = 64  # bytes: as many fields, or fewer
EMPTY_TABLE = b"\x20"  # before the first block that we write: the size of its table (6.3)
STATUS_200 = b"\x88"  # the field of the static table
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
