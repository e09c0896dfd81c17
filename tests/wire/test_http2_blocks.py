"""Header blocks that a server reads: in pieces, padded, and with a table that both sides keep."""

import random
import struct

import pytest
from hpack import Decoder, Encoder
from hpack.hpack import encode_integer
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PRIORITY,
    frame,
)
from appliance.wire.http2_headers import LARGEST_HEADERS, MOST_KNOWN_BLOCKS, HeaderTuple
from appliance.wire.http2_server import (
    LARGEST_BLOCK,
    ServerConnection,
    StreamData,
    StreamOpened,
)
from testing.specs import LAW
from tests.wire.callers import REQUEST, RawCaller

TABLE = 4096  # bytes of a peer's table, as it is unless somebody says otherwise
LAST_ENTRY = bytes((0x80 | 62,))  # the newest field of the table (RFC 7541, 2.3.3)
OLDER_ENTRY = bytes((0x80 | 63,))


def opened(caller: RawCaller, block: bytes) -> HeaderTuple:
    """The headers of a call whose block this is."""
    stream = caller.server.last_stream + 2 if caller.server.last_stream else 1
    (event,) = caller.say(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
    assert isinstance(event, StreamOpened)
    caller.server.reset(stream, 8)
    caller.read()
    return event.headers


def added(key: str, value: str) -> bytes:
    """The block of one field that goes into the table (RFC 7541, 6.2.1)."""
    return b"\x40" + literal(key) + literal(value)


def literal(text: str) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text.encode()


def of_size(key: str, size: int) -> str:
    """The value with which a field takes so much of the table."""
    return key * (size - 32 - len(key))


# -- the frames --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_blocks_may_come_in_pieces_padded_and_with_priority(cut: int) -> None:
    caller = RawCaller()
    headers = (*REQUEST, ("x-long", "v" * 5000))
    block = caller.block_of(headers)
    priority = struct.pack(">IB", 0x8000_0000, 16)
    pieces = [
        frame(HEADERS, PADDED | PRIORITY, 1, b"\x03" + priority + block[:cut] + b"\0\0\0"),
        *[frame(CONTINUATION, 0, 1, piece) for piece in (b"", block[cut : 2 * cut], b"")],
        frame(CONTINUATION, END_HEADERS, 1, block[2 * cut :]),
        frame(DATA, PADDED, 1, b"\x05" + b"half" + bytes(5)),
        frame(DATA, PADDED | END_STREAM, 1, b"\x00"),
        frame(HEADERS, PADDED | PRIORITY | END_HEADERS | END_STREAM, 3, b"\x00" + priority + caller.block_of(headers)),
    ]
    assert caller.say(*pieces) == [
        StreamOpened(1, headers, False),
        StreamData(1, b"half", 10, False),
        StreamData(1, b"", 1, True),
        StreamOpened(3, headers, True),
    ]


def test_the_end_that_headers_have_counts_when_the_whole_block_has_come() -> None:
    caller = RawCaller()
    block = caller.block_of(REQUEST)
    assert caller.say(frame(HEADERS, END_STREAM, 1, block[:3]), frame(CONTINUATION, 0, 1, block[3:])) == []
    assert caller.say(frame(CONTINUATION, END_HEADERS, 1, b"")) == [StreamOpened(1, REQUEST, True)]


def test_trailers_end_a_request_and_leave_their_fields_in_the_table() -> None:
    caller = RawCaller()
    trailers = (("x-trailer", "1"),)
    events = caller.say(
        caller.open(1), caller.data(1, b"x"), caller.open(1, trailers, end=True), caller.open(3, trailers)
    )
    assert events[2:] == [StreamData(1, b"", 0, True), StreamOpened(3, trailers, False)]


def test_priorities_mean_nothing() -> None:
    caller = RawCaller()
    assert caller.say(frame(2, 0, 1, bytes(5)), caller.open(1), frame(2, 0, 1, bytes(5)), frame(2, 0, 9, bytes(5))) == [
        StreamOpened(1, REQUEST, False)
    ]
    assert caller.goaways == []


def test_the_block_of_a_stream_that_is_not_taken_is_read_all_the_same() -> None:
    caller = RawCaller()
    caller.say(caller.open(1), caller.open(3, end=True))
    caller.server.reset(1, 8)
    late = (caller.open(1, (("x-one", "1"),), end=True), caller.open(3, (("x-two", "2"),), end=True))
    assert caller.say(*late)[1:] == []
    headers = (*REQUEST, ("x-one", "1"), ("x-two", "2"))
    assert min(caller.block_of(headers)) >= 0x80  # all of them are in the table
    assert caller.say(caller.open(5, headers)) == [StreamOpened(5, headers, False)]


def test_values_that_are_no_text_are_kept_as_they_are() -> None:
    caller = RawCaller()
    block = b"\x00" + literal("x-raw") + b"\x03\xff\xc3\xa4"
    ((key, value),) = opened(caller, block)
    assert (key, value.encode("utf-8", "surrogateescape")) == ("x-raw", b"\xff\xc3\xa4")


# -- blocks that are remembered ----------------------------------------------------------------------------------------


def test_the_same_block_is_the_same_object_as_long_as_the_table_stays() -> None:
    caller = RawCaller()
    first, second, third = [opened(caller, caller.block_of(REQUEST)) for _ in range(3)]
    assert first == second == third == REQUEST
    assert second is third
    opened(caller, b"\x10" + literal("x-kept-by-no-table") + literal("1"))
    assert opened(caller, caller.block_of(REQUEST)) is third
    opened(caller, caller.block_of([("x-new", "1")]))
    assert opened(caller, caller.block_of(REQUEST)) == REQUEST
    assert opened(caller, LAST_ENTRY) == (("x-new", "1"),)


def test_a_field_too_large_for_the_table_empties_it_and_those_behind_it_take_the_places() -> None:
    """Of the calls below the second and the last have the same block, and other paths."""
    caller = RawCaller()
    user = ("x-user", "1")
    first, second, large = [(":path", "/one"), user], [(":path", "/two"), user], ("x-large", "v" * TABLE)
    blocks = []
    for headers in (first, first, [large, *second], second):
        blocks.append(caller.block_of(headers))
        assert opened(caller, blocks[-1]) == tuple(headers)
    assert blocks[1] == blocks[3]


CHANGES = {
    "another field is added": (["a", "b"], added("c", of_size("c", 1000)), "b"),
    "the newest is added again": (["b", "a"], added("a", of_size("a", TABLE // 2)), "a"),
    "a large one drives the newest out, which is added again": (
        ["b", "a"],
        added("c", of_size("c", TABLE)) + added("d", of_size("d", TABLE // 2)) + added("a", of_size("a", TABLE // 2)),
        "d",
    ),
    "the table is emptied and filled again": (
        ["b", "a"],
        b"\x20\x3f\xe1\x1f" + added("d", of_size("d", TABLE // 2)) + added("a", of_size("a", TABLE // 2)),
        "d",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_means_what_the_table_says_now(change: str) -> None:
    names, block, older = CHANGES[change]
    caller = RawCaller()
    for name in names:
        opened(caller, added(name, of_size(name, TABLE // 2)))
    assert opened(caller, OLDER_ENTRY)[0][0] == names[0]
    opened(caller, block)
    assert opened(caller, OLDER_ENTRY)[0][0] == older


def test_a_table_that_shrinks_takes_the_blocks_along_that_meant_its_fields() -> None:
    caller = RawCaller()
    for name in ("b", "a"):
        opened(caller, added(name, of_size(name, 1000)))
    assert opened(caller, OLDER_ENTRY)[0][0] == "b"
    opened(caller, b"\x3f\xc9\x07" + b"\x82")  # 1000 bytes: room for the newest
    assert [type(each).__name__ for each in caller.say(frame(HEADERS, END_HEADERS, 99, OLDER_ENTRY))] == [
        "ProtocolViolated"
    ]


FIELDS = st.tuples(
    st.sampled_from(["x-a", "x-b", "x-c", ":path"]),
    st.sampled_from(["1", "2", "v" * 60, "w" * 100, "u" * 400]),
)
BLOCKS = st.lists(st.tuples(st.lists(FIELDS, min_size=1, max_size=4), st.booleans()), min_size=2, max_size=12)


@LAW
@given(BLOCKS, st.lists(st.sampled_from([0, 100, 200, 350, TABLE]), min_size=1, max_size=4), st.randoms())
def test_whatever_an_encoder_does_its_blocks_mean_what_was_encoded(
    blocks: list[tuple[list[tuple[str, str]], bool]], sizes: list[int], chance: random.Random
) -> None:
    caller = RawCaller()
    for _ in range(2):
        for headers, huffman in blocks:
            if chance.random() < 0.2:
                caller.encoder.header_table_size = chance.choice(sizes)
            assert opened(caller, caller.encoder.encode(headers, huffman=huffman)) == tuple(headers)


PIECES = [LAST_ENTRY, OLDER_ENTRY, b"\x82", *(added(name, of_size(name, TABLE // 2)) for name in ("a", "b", "c"))]


@pytest.mark.parametrize("seed", range(10))
def test_blocks_mean_the_same_to_one_who_remembers_none(seed: int) -> None:
    """Also those of an encoder that adds a field which the table has, as it may."""
    chance = random.Random(seed)
    caller, decoder = RawCaller(), Decoder()
    two = added("c", of_size("c", TABLE // 2)) + added("b", of_size("b", TABLE // 2))
    blocks = [b"".join(chance.choices(PIECES, k=chance.choice([1, 1, 2]))) for _ in range(60)]
    for block in (two, *blocks):
        expected = tuple((str(key), str(value)) for key, value in decoder.decode(block))
        assert opened(caller, block) == expected


def test_a_connection_remembers_a_few_blocks_only() -> None:
    server = ServerConnection()
    for number in range(2**8):
        server.headers.decoded(bytes(0x82 + (number >> bit & 1) for bit in range(8)))
        assert 0 < len(server.headers.known_blocks) <= MOST_KNOWN_BLOCKS


def test_a_connection_does_not_remember_what_is_large() -> None:
    """A field of the table takes a byte to send, and a hundred and more to keep."""
    server = ServerConnection()
    for number in range(8):
        block = bytes(0x82 + (number >> bit & 1) for bit in range(8))
        assert len(server.headers.decoded(block * 300)) == 2400
        server.headers.decoded(block)
    assert sum(len(headers) for headers in server.headers.known_blocks.values()) < 1000


# -- too much ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LARGEST_BLOCK, LARGEST_BLOCK + 1])
def test_a_block_may_be_long_and_not_longer(size: int) -> None:
    caller = RawCaller()
    block = b"\x10" + literal("x-long")
    block += literal("v" * (size - len(block) - 4))
    assert len(block) == size
    begin = frame(HEADERS, 0, 1, block[:1000])
    events = caller.say(begin, frame(CONTINUATION, 0, 1, block[1000:-1]), frame(CONTINUATION, 4, 1, block[-1:]))
    caller.read()
    assert caller.goaways == ([(0, 11)] if size > LARGEST_BLOCK else [])
    assert isinstance(events[0], StreamOpened) != bool(caller.goaways)


def test_headers_that_are_many_when_they_are_unpacked_end_the_connection() -> None:
    """A field of the table takes a byte to send: a small block would become a large list."""
    field = ("x-large", "v" * 4000)
    size = len(field[0]) + len(field[1]) + 32
    for number, ends in ((LARGEST_HEADERS // size, False), (LARGEST_HEADERS // size + 1, True)):
        caller = RawCaller()
        opened(caller, added(*field))
        events = caller.say(frame(HEADERS, END_HEADERS, 3, LAST_ENTRY * number))
        caller.read()
        assert caller.goaways == ([(1, 9)] if ends else [])
        assert isinstance(events[0], StreamOpened) != ends


def test_headers_go_through_whatever_the_peers_encoder_does_with_them() -> None:
    caller, encoder = RawCaller(), Encoder()
    for size in (TABLE, 0, 64, TABLE):
        encoder.header_table_size = size
        for sensitive in (False, True):
            block = encoder.encode([(key, value, sensitive) for key, value in REQUEST])
            assert opened(caller, bytes(block)) == REQUEST
