"""Header blocks without a table are cut into fields, each read once: what comes out is what the decoder says of all."""

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hpack.hpack import encode_integer
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire.http2_headers import (
    LARGEST_SHARED_BLOCK,
    MOST_SHARED_FIELDS,
    Headers,
    cut,
    header_without_table,
    headers_without_table,
    plain_headers,
)
from testing.specs import LAW

NAMES = st.sampled_from([":status", "content-type", "x-compute-time", "grpc-status", "x-" + "n" * 130])
VALUES = st.one_of(st.text("0123456789abc%é ", max_size=20), st.text("ab", min_size=120, max_size=140))
KINDS = (0x00, 0x10, 0x40)  # not indexed, never indexed, to be indexed


def literal(text: str) -> bytes:
    return bytes(encode_integer(len(text.encode()), 7)) + text.encode()


PLAIN = st.builds(
    lambda kind, name, value: bytes([kind]) + literal(name) + literal(value), st.sampled_from(KINDS), NAMES, VALUES
)
STATIC = st.integers(1, 61).map(lambda place: bytes([0x80 | place]))
NAMED = st.builds(lambda place, value: bytes([0x40 | place]) + literal(value), st.integers(1, 61), VALUES)
HUFFMAN = st.builds(lambda name, value: bytes(Encoder().encode([(name, value)], huffman=True)), NAMES, VALUES)


def said_of_all(block: bytes) -> Headers | None:
    """What hpack's decoder says of the whole block without a table; None for one that it refuses."""
    decoder = Decoder()
    decoder.header_table_size = 0
    try:
        return plain_headers(decoder, block)
    except HPACKError:
        return None


def said(block: bytes) -> Headers | None:
    try:
        return headers_without_table(block)
    except HPACKError:
        return None


@LAW
@given(st.lists(st.one_of(PLAIN, STATIC, NAMED, HUFFMAN), max_size=8).map(b"".join))
def test_a_block_says_what_its_fields_say(block: bytes) -> None:
    assert said(block) == said_of_all(block)


@LAW
@given(st.binary(max_size=40))
def test_what_is_no_block_is_refused_as_before(block: bytes) -> None:
    assert said(block) == said_of_all(block)


@LAW
@given(st.lists(st.one_of(PLAIN, NAMED), min_size=1, max_size=3).map(b"".join), st.data())
def test_a_block_that_is_cut_off_or_damaged_is_refused_as_before(block: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(block) - 1))
    damaged = block[:at] + bytes([data.draw(st.integers(0, 255))]) + block[at + 1 :]
    for each in (block[:at], damaged):
        assert said(each) == said_of_all(each)


def test_fields_are_read_once_and_remembered_within_bounds() -> None:
    header_without_table.cache_clear()
    for time in range(3 * MOST_SHARED_FIELDS):
        fields = (("x-compute-type", "cpu"), ("x", f"{time}"))
        block = b"\x88" + b"".join(b"\x40" + literal(name) + literal(value) for name, value in fields)
        assert headers_without_table(block) == [(":status", "200"), *fields]
    known = header_without_table.cache_info()
    assert (known.misses, known.currsize) == (3 * MOST_SHARED_FIELDS + 2, MOST_SHARED_FIELDS)


def test_long_fields_are_left_to_the_decoder() -> None:
    assert cut(b"\x40" + literal("x") + literal("y" * 126))
    assert cut(b"\x40" + literal("x") + literal("y" * 127)) is None
    assert cut(b"\xff\x00") is None
    assert cut(b"\x88\x20") is None, "a new size of the table belongs before all fields"
    assert len(b"\x40" + literal("x") + literal("y" * 900)) < LARGEST_SHARED_BLOCK
    assert said(b"\x40" + literal("x") + literal("y" * 900)) == [("x", "y" * 900)]
