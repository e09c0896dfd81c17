"""The state machine of HTTP/2, byte by byte: no socket, no thread, no clock."""

import os
import struct
from collections.abc import Callable

import pytest

from appliance.wire.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_STREAM,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    OUR_FRAME_SIZE,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    TOP_UP,
    WINDOW_UPDATE,
    ClientConnection,
    DataReceived,
    HeadersReceived,
    ProtocolViolated,
    StreamEvent,
    StreamReset,
    StreamUnprocessed,
    frame,
)
from appliance.wire.http2_headers import LARGEST_SHARED_BLOCK, MOST_SHARED_BLOCKS, headers_without_table
from appliance.wire.http2_server import ServerConnection, StreamData
from tests.wire.peers import Frame, Peer

REQUEST = [(":method", "POST"), (":path", "/t/x"), ("te", "trailers")]


def connected(*settings: tuple[int, int]) -> tuple[ClientConnection, Peer]:
    """A connection whose peer has greeted, with stream 1 open."""
    client = ClientConnection()
    peer = Peer(client)
    assert client.receive(peer.settings(*settings)) == []
    client.open(REQUEST)
    peer.read()
    return client, peer


def test_the_preface_comes_first_with_settings_that_open_all_windows_and_refuse_pushes() -> None:
    client = ClientConnection()
    first, second = Peer(client).read()
    assert (first.kind, first.stream) == (SETTINGS, 0)
    assert dict(struct.iter_unpack(">HI", first.payload)) == {2: 0, 1: 0, 4: LARGEST_WINDOW, 5: OUR_FRAME_SIZE}
    assert second == Frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW))
    assert not client.greeted


def test_settings_are_acknowledged_once_and_say_that_the_connection_was_accepted() -> None:
    client, peer = connected()
    assert client.greeted
    assert [each for each in peer.frames if each.flags & ACK and each.kind == SETTINGS] == [
        Frame(SETTINGS, ACK, 0, b"")
    ]
    client.receive(frame(SETTINGS, ACK, 0, b""))
    assert peer.read() == []


def test_a_request_is_headers_and_data_and_is_ended_once() -> None:
    client, peer = connected()
    client.send(b"one", end=False)
    client.send(b"two", end=True)
    assert peer.read() == [Frame(DATA, END_STREAM, 1, b"onetwo")]
    assert peer.headers() == REQUEST
    assert client.data_to_send() == b""


def test_an_end_without_data_is_an_empty_frame() -> None:
    client, peer = connected()
    client.send(b"", end=False)
    assert peer.read() == []
    client.send(b"", end=True)
    assert peer.read() == [Frame(DATA, END_STREAM, 1, b"")]


def test_long_headers_go_on_in_continuations() -> None:
    client = ClientConnection()
    peer = Peer(client)
    headers = [*REQUEST, ("x-long", "v" * 3 * DEFAULT_FRAME_SIZE)]
    client.open(headers)
    kinds = [(each.kind, each.flags) for each in peer.read()[2:]]
    assert kinds == [(HEADERS, 0), (CONTINUATION, 0), (CONTINUATION, 0), (CONTINUATION, END_HEADERS)]
    assert peer.headers() == headers


# -- flow control ------------------------------------------------------------------------------------------------------


def test_windows_that_open_late_let_everything_through_and_are_never_overdrawn() -> None:
    client, peer = connected((INITIAL_WINDOW_SIZE, 10))
    sent, granted = os.urandom(70_000), 10
    client.send(sent, end=True)
    while granted < len(sent):
        assert peer.body() == sent[:granted]
        assert not peer.sent_all()
        client.receive(peer.grant(0, 7000))
        assert len(peer.body()) == min(granted, len(sent))  # the stream's window counts, too
        client.receive(peer.grant(1, 7000))
        granted += 7000
    assert peer.body() == sent
    assert peer.sent_all()


def test_the_connections_window_holds_back_what_the_streams_would_take() -> None:
    client, peer = connected((INITIAL_WINDOW_SIZE, 2**30))
    client.send(bytes(100_000), end=True)
    assert len(peer.body()) == DEFAULT_WINDOW
    client.receive(peer.grant(0, 100))
    assert len(peer.body()) == DEFAULT_WINDOW + 100
    held_back = [client.held_back]
    client.receive(peer.grant(0, 2**20))
    peer.read()
    assert [*held_back, client.held_back] == [True, False]


def test_settings_that_shrink_the_window_below_zero_stop_the_sender_until_it_is_positive_again() -> None:
    client, peer = connected()
    client.send(bytes(100_000), end=True)
    assert len(peer.body()) == DEFAULT_WINDOW
    client.receive(peer.settings((INITIAL_WINDOW_SIZE, 1000)) + peer.grant(0, 2**20))
    assert len(peer.body()) == DEFAULT_WINDOW
    client.receive(peer.grant(1, DEFAULT_WINDOW - 1000))  # exactly zero: still nothing may go
    assert len(peer.body()) == DEFAULT_WINDOW
    client.receive(peer.grant(1, 200_000))
    assert len(peer.body()) == 100_000


def test_frames_are_as_large_as_the_peer_takes_them() -> None:
    client, peer = connected((INITIAL_WINDOW_SIZE, 2**30), (MAX_FRAME_SIZE, 20_000))
    client.receive(peer.grant(0, 2**20))
    client.send(bytes(50_000), end=True)
    assert [len(each.payload) for each in peer.read()] == [20_000, 20_000, 10_000]


def test_much_data_goes_out_in_parts() -> None:
    client, peer = connected((INITIAL_WINDOW_SIZE, 2**30), (MAX_FRAME_SIZE, 2**20))
    client.receive(peer.grant(0, 2**30))
    client.send(bytes(2**22), end=True)
    parts = []
    while part := client.data_to_send():
        parts.append(len(part))
    assert max(parts) < 2**20
    assert sum(parts) > 2**22


def test_what_has_been_sent_is_not_kept() -> None:
    client, peer = connected((INITIAL_WINDOW_SIZE, 2**30))
    client.send(bytes(1000), end=True)
    peer.read()
    assert client.body == b""


@pytest.mark.parametrize("stream", [0, 1])
def test_the_windows_granted_to_the_peer_stay_open_and_never_pass_what_the_protocol_allows(stream: int) -> None:
    """A peer that counts (h2, under TEI) ends the connection when a grant takes its window over 2^31 - 1."""
    client, peer = connected()
    window, lowest, received = LARGEST_WINDOW, LARGEST_WINDOW, 0
    chunk = peer.data(1, bytes(OUR_FRAME_SIZE))
    while received < 3 * TOP_UP:
        client.receive(chunk)
        received += OUR_FRAME_SIZE
        window -= OUR_FRAME_SIZE
        lowest = min(lowest, window)
        for each in peer.read():
            if (each.kind, each.stream) == (WINDOW_UPDATE, stream):
                window += int.from_bytes(each.payload, "big")
                assert window <= LARGEST_WINDOW
    assert lowest >= LARGEST_WINDOW - TOP_UP - OUR_FRAME_SIZE


# -- what the peer says ------------------------------------------------------------------------------------------------


def test_header_blocks_may_come_in_pieces_padded_and_with_priority() -> None:
    client, peer = connected()
    block = peer.block([(":status", "200"), ("x-long", "v" * 5000)])
    raw = frame(HEADERS, PADDED | PRIORITY, 1, b"\x03" + b"\0\0\0\0\x10" + block[:7] + b"\0\0\0")
    raw += frame(CONTINUATION, 0, 1, block[7:3000]) + frame(CONTINUATION, END_HEADERS, 1, block[3000:])
    raw += frame(DATA, PADDED, 1, b"\x05" + b"half" + bytes(5)) + frame(DATA, PADDED | END_STREAM, 1, b"\x00" + b"more")
    assert client.receive(raw) == [
        HeadersReceived([(":status", "200"), ("x-long", "v" * 5000)], ends=False),
        DataReceived(b"half", ends=False),
        DataReceived(b"more", ends=True),
    ]


def test_a_ping_is_answered_with_its_own_bytes_and_an_answer_is_not() -> None:
    client, peer = connected()
    assert client.receive(frame(PING, 0, 0, b"8 bytes!")) == []
    assert peer.read() == [Frame(PING, ACK, 0, b"8 bytes!")]
    assert client.receive(frame(PING, ACK, 0, b"8 bytes!") + frame(0x42, 0, 0, b"unknown frames are ignored")) == []
    assert peer.read() == []


def test_a_reset_is_an_event_unless_the_stream_has_ended() -> None:
    """RFC 9113 8.1: a server that needs no more of the request says so behind its trailers."""
    client, peer = connected()
    reset = frame(RST_STREAM, 0, 1, struct.pack(">I", 8))
    assert client.receive(reset) == [StreamReset(8)]
    client, peer = connected()
    ended = HeadersReceived([("grpc-status", "3")], ends=True)
    assert client.receive(peer.end(1, ("grpc-status", "3")) + frame(RST_STREAM, 0, 1, bytes(4))) == [ended]
    assert not client.reusable  # the request was not sent to its end


def test_a_connection_is_reusable_when_both_sides_have_ended_the_stream() -> None:
    client = ClientConnection()
    peer = Peer(client)
    states = [client.reusable]
    for stream in (1, 3, 5):
        assert client.open(REQUEST) == stream
        client.send(b"x", end=True)
        assert peer.body(stream) == b"x"
        states.append(client.reusable)
        assert client.receive(peer.data(stream, b"y", end=True)) == [DataReceived(b"y", ends=True)]
        states.append(client.reusable)
    assert states == [True, False, True, False, True, False, True]


def test_goaway_lets_the_stream_end_and_no_other_follows() -> None:
    client, peer = connected()
    client.send(b"", end=True)
    peer.read()
    assert client.receive(frame(GOAWAY, 0, 0, struct.pack(">II", 2**31 - 1, 0))) == []
    assert client.receive(peer.data(1, b"y", end=True)) == [DataReceived(b"y", ends=True)]
    assert not client.reusable


def test_goaway_that_leaves_the_stream_out_is_its_end() -> None:
    """The last stream that the peer will answer is named: a later one will never be."""
    client, peer = connected()
    assert client.receive(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0))) == [StreamUnprocessed()]
    assert client.receive(peer.data(1, b"y")) == []


def test_the_numbers_of_streams_come_to_an_end() -> None:
    client, peer = connected()
    client.send(b"", end=True)
    peer.read()
    client.next_stream = LARGEST_STREAM + 2
    client.receive(peer.end(1))
    assert not client.reusable


def test_what_belongs_to_an_earlier_stream_does_not_disturb_the_next() -> None:
    client, peer = connected((HEADER_TABLE_SIZE, 4096))
    client.send(b"x", end=True)
    peer.read()
    client.receive(peer.end(1))
    client.open(REQUEST)
    late = (
        peer.grant(1, 5) + frame(RST_STREAM, 0, 1, bytes(4)) + peer.data(1, b"late") + peer.end(1, ("x-new", "entry"))
    )
    assert client.receive(late) == []
    assert client.stream_window == DEFAULT_WINDOW
    # The table of header fields is the connection's: the block of the earlier stream had to be decoded.
    assert client.receive(peer.reply(3, ("x-new", "entry"))) == [
        HeadersReceived([(":status", "200"), ("x-new", "entry")], ends=False)
    ]


def test_a_block_means_the_same_again_as_long_as_the_table_has_no_room() -> None:
    client, peer = connected()
    answers = [("x-one", "1"), ("x-two", "2"), ("x-one", "1")]
    # The peer obeys: its table is empty. Then it makes room for one, which its blocks refer to.
    for size in (0, 4096, 0):
        peer.encoder.header_table_size = size
        for field in answers:
            assert client.receive(peer.reply(1, field)) == [HeadersReceived([(":status", "200"), field], ends=False)]
        assert client.decoder.header_table_size == size


def test_headers_are_encoded_anew_when_the_table_of_the_peer_changes() -> None:
    client, peer = connected()
    assert peer.headers() == REQUEST
    other = [*REQUEST[:1], (":path", "/t/other"), *REQUEST[2:]]
    for size in (4096, 0, 64, 4096):
        client.receive(peer.settings((HEADER_TABLE_SIZE, size)))
        for number, headers in enumerate((REQUEST, other) * 3):
            metadata = [("grpc-timeout", f"{number}m"), ("x-word", "1")]
            client.open(headers, metadata)
            peer.read()
            assert peer.headers() == [*headers, *metadata]
            assert "grpc-timeout" not in str(client.encoder.header_table.dynamic_entries)
        assert bool(client.known_headers) == (size == 4096)


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 2000])
def test_metadata_of_any_length_is_read_and_kept_in_no_table(length: int) -> None:
    client, peer = connected()
    client.open(REQUEST)  # the first that uses the table
    peer.read()
    peer.headers()
    entries = list(peer.decoder.header_table.dynamic_entries)
    metadata = [("k" * max(1, length), "v" * length), ("x-umlaut", "ä" * length), ("te", "trailers")]
    client.open(REQUEST, metadata)
    peer.read()
    headers = peer.headers()
    assert headers == [*REQUEST, *metadata]
    assert list(peer.decoder.header_table.dynamic_entries) == entries


def test_a_block_with_a_table_means_nothing_on_another_connection() -> None:
    field = ("x-one", "1")
    for _ in range(2):  # also once it was read
        (one, peer), (other, stranger) = connected(), connected()
        first, again = peer.reply(1, field), peer.reply(1, field)
        assert one.receive(first) == one.receive(again)
        stranger.encoder.header_table_size = 0
        assert other.receive(stranger.reply(1, field)) == [HeadersReceived([(":status", "200"), field], ends=False)]
        (wrong,) = other.receive(again)
        assert isinstance(wrong, ProtocolViolated)
        assert other.receive(stranger.reply(1, field)) == []


def test_a_table_that_is_emptied_and_given_room_again_is_used() -> None:
    client, peer = connected()
    before, after = ("x-one", "1"), ("x-two", "2")
    client.receive(peer.reply(1, before))
    peer.encoder.header_table_size = 0
    peer.encoder.header_table_size = 4096  # the next block says both
    for _ in range(2):
        for field in (after, before):
            assert client.receive(peer.reply(1, field)) == [HeadersReceived([(":status", "200"), field], ends=False)]
    assert client.decoder.header_table_size == 4096


def test_blocks_are_remembered_within_bounds() -> None:
    client, peer = connected()
    peer.encoder.header_table_size = 0
    for number in range(2 * MOST_SHARED_BLOCKS):
        for field in (("x-number", str(number)), ("x-long", "x" * LARGEST_SHARED_BLOCK)):
            assert client.receive(peer.reply(1, field)) == [HeadersReceived([(":status", "200"), field], ends=False)]
    assert headers_without_table.cache_info().currsize <= MOST_SHARED_BLOCKS


@pytest.mark.parametrize("size", [0, 64, 4096])
def test_the_first_call_tells_the_size_of_the_table_that_the_peer_wants(size: int) -> None:
    client = ClientConnection()
    peer = Peer(client)
    client.receive(peer.settings((HEADER_TABLE_SIZE, size)))
    peer.decoder.max_allowed_table_size = size  # it takes no block that does not keep to that
    client.open(REQUEST)
    peer.read()
    assert peer.headers() == REQUEST


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (frame(CONTINUATION, END_HEADERS, 1, b""), "without HEADERS"),
        (frame(HEADERS, END_HEADERS, 1, b"\xff" * 20), "unreadable headers"),
        (frame(SETTINGS, 0, 0, b"12345"), ""),
        (frame(DATA, PADDED, 1, b""), ""),
        (frame(GOAWAY, 0, 0, b""), None),
    ],
)
def test_what_is_not_http2_is_the_last_event_behind_those_before_it(wrong: bytes, words: str | None) -> None:
    client, peer = connected()
    events = client.receive(peer.data(1, b"good") + wrong + peer.data(1, b"never seen"))
    assert events[0] == DataReceived(b"good", ends=False)
    if words is None:  # too short, but it says enough
        assert events[1] == StreamUnprocessed()
        return
    (violated,) = events[1:]
    assert isinstance(violated, ProtocolViolated)
    assert words in violated.details
    assert client.receive(peer.data(1, b"more")) == []
    assert not client.reusable


# -- bytes as they come ------------------------------------------------------------------------------------------------


def conversation(peer: Peer) -> bytes:
    block = peer.block([(":status", "200"), ("x-long", "v" * 40)])
    return b"".join(
        [
            frame(HEADERS, PADDED, 1, b"\x02" + block[:7] + bytes(2)),
            frame(CONTINUATION, END_HEADERS, 1, block[7:]),
            frame(PING, 0, 0, b"8 bytes!"),
            peer.data(1, b""),
            peer.data(1, b"some data"),
            peer.settings((MAX_FRAME_SIZE, 20_000)),
            peer.grant(0, 1000) + peer.grant(1, 1000),
            frame(DATA, PADDED, 1, b"\x05" + b"padded" + bytes(5)),
            peer.end(1, ("grpc-status", "0"), ("x-end", "1")),
            frame(RST_STREAM, 0, 1, bytes(4)),
            frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0)),
        ]
    )


def broken(peer: Peer) -> bytes:
    return peer.reply(1) + peer.data(1, b"some data") + frame(CONTINUATION, END_HEADERS, 1, b"") + peer.data(1, b"no")


def reset(peer: Peer) -> bytes:
    return peer.reply(1) + peer.data(1, b"some data") + frame(RST_STREAM, 0, 1, struct.pack(">I", 7))


@pytest.mark.parametrize("talk", [conversation, broken, reset])
def test_the_same_bytes_give_the_same_events_and_the_same_answers_wherever_they_are_cut(
    talk: Callable[[Peer], bytes],
) -> None:
    def heard(pieces: Callable[[bytes], list[bytes]]) -> tuple[list[StreamEvent], list[Frame], bool]:
        client, peer = connected()
        client.send(bytes(100), end=True)
        peer.read()
        events = [event for piece in pieces(talk(peer)) for event in client.receive(piece)]
        return events, peer.read(), client.reusable

    whole = heard(lambda raw: [raw])
    assert whole[0]
    length = len(talk(Peer(ClientConnection())))
    for at in range(length):
        assert heard(lambda raw, at=at: [raw[:at], raw[at:]]) == whole
    assert heard(lambda raw: [raw[at : at + 1] for at in range(length)]) == whole
    for at in range(0, length, 7):
        for further in range(at, length, 5):
            assert heard(lambda raw, a=at, b=further: [raw[:a], raw[a:b], raw[b:]]) == whole


def test_a_frame_that_comes_in_many_pieces_costs_in_proportion_to_its_length() -> None:
    client, peer = connected()
    raw = peer.data(1, bytes(OUR_FRAME_SIZE))
    looks = 0
    for at in range(0, len(raw), 1000):
        looks += len(client.incomplete.join(b""))  # bytes that would be looked at again
        events = client.receive(raw[at : at + 1000])
    assert events == [DataReceived(bytes(OUR_FRAME_SIZE), ends=False)]
    assert looks == 0


@pytest.mark.parametrize("more", [[b""], [b"more", b""], [b"more", b"and more"]])
def test_what_is_sent_behind_a_body_that_waits_comes_behind_it_and_nothing_twice(more: list[bytes]) -> None:
    """An empty end behind a body of which a part had gone out had that part sent again."""
    client, server = ClientConnection(), ServerConnection()
    stream = client.open(REQUEST)
    sent, arrived = [b"first" * 20_000, *more], b""
    for number, data in enumerate(sent):
        client.send(data, end=number == len(sent) - 1)
        for event in server.receive(bytes(client.data_to_send())):
            arrived += event.data if isinstance(event, StreamData) else b""
    assert 0 < len(arrived) < len(sent[0])
    while client.held_back:
        server.consumed(stream, 2**16)
        client.receive(bytes(server.data_to_send()))
        for event in server.receive(bytes(client.data_to_send())):
            arrived += event.data if isinstance(event, StreamData) else b""
    assert arrived == b"".join(sent)
