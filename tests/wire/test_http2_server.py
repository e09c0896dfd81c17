"""The server's state machine of HTTP/2 with whole calls: of our own client, and of `h2`, which others wrote."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from appliance.wire.calls import ClientCall, Code, Metadata, Status, framed, metadata_headers, request_headers
from appliance.wire.http2 import (
    DATA,
    DEFAULT_FRAME_SIZE,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    ClientConnection,
    frame,
)
from appliance.wire.http2_headers import HeaderTuple, string_literal
from appliance.wire.http2_server import (
    OUR_FRAME_SIZE,
    REFUSED_STREAM,
    ServerConnection,
    ServerEvent,
    StreamData,
    StreamOpened,
)
from appliance.wire.served_calls import only_message, reply_headers, request_of, status_trailers
from tests.wire.callers import REQUEST, RawCaller

Cut = Callable[[bytes], Iterable[bytes]]


def in_bytes(raw: bytes) -> list[bytes]:
    return [raw[at : at + 1] for at in range(len(raw))]


def in_pieces(raw: bytes) -> list[bytes]:
    chance, pieces = random.Random(len(raw)), []
    while raw:
        size = chance.choice([1, 8, 9, 10, 1000, 100_000])
        pieces.append(raw[:size])
        raw = raw[size:]
    return pieces


class EchoingServer:
    """A server whose methods answer with what they were sent, and with the path and metadata as trailers."""

    def __init__(self, cut: Cut) -> None:
        self.protocol, self.cut = ServerConnection(), cut
        self.bodies: dict[int, bytearray] = {}
        self.headers: dict[int, HeaderTuple] = {}

    def heard(self, raw: bytes) -> bytes:
        """What it sends back."""
        for piece in self.cut(raw):
            for event in self.protocol.receive(piece):
                self.take(event)
        sent = b""
        while data := self.protocol.data_to_send():
            sent += data
        return sent

    def take(self, event: ServerEvent) -> None:
        if isinstance(event, StreamOpened):
            self.headers[event.stream], self.bodies[event.stream] = event.headers, bytearray()
        else:
            assert isinstance(event, StreamData)
            self.protocol.consumed(event.stream, event.size)
            self.bodies[event.stream] += event.data
        if event.ends:
            self.answer(event.stream)

    def answer(self, stream: int) -> None:
        request, message = request_of(self.headers.pop(stream)), only_message(self.bodies.pop(stream))
        assert request.is_plain
        assert message is not None
        trailers = status_trailers(0, request.path, request.metadata)
        self.protocol.reply(stream, reply_headers([("x-first", "1")]), framed([message]), trailers)


@pytest.mark.parametrize("size", [0, 1, 300, DEFAULT_FRAME_SIZE, 70_000])
@pytest.mark.parametrize("cut", [lambda raw: [raw], in_bytes, in_pieces])
def test_calls_of_our_own_client_come_back_one_after_the_other(cut: Cut, size: int) -> None:
    client, server = ClientConnection(), EchoingServer(cut)
    for number in range(4):
        message = random.Random(size).randbytes(size)
        metadata: Metadata = [("x-number", str(number)), ("x-raw-bin", b"\x00\xff")]
        client.open(request_headers(f"/t/{number % 2}", "here"), metadata_headers(metadata))
        client.send(framed([message]), end=True)
        call = ClientCall()
        messages: list[bytes] = []
        while call.status is None:
            sent = b""
            while data := client.data_to_send():
                sent += data
            back = server.heard(sent)
            assert sent or back
            messages += call.messages(client.receive(back))
        assert messages == [message]
        assert call.headers == [("x-first", "1")]
        assert call.status == Status(Code.OK, f"/t/{number % 2}", metadata)
    assert server.protocol.streams == {}
    assert len(server.protocol.headers.known_blocks) == 0  # each had metadata of its own


class StrangeCalls:
    """Calls of `h2`, as many at a time as are begun."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.unsent: dict[int, bytes] = {}
        self.replies: dict[int, list[Any]] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.others: list[Any] = []

    def begin(self, message: bytes, *metadata: tuple[str, str]) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [*REQUEST, *metadata])
        self.unsent[stream], self.replies[stream], self.bodies[stream] = framed([message]), [], b""
        return stream

    def say(self) -> bytes:
        """A frame of each, as far as the windows allow it."""
        for stream, body in list(self.unsent.items()):
            size = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(body))
            self.unsent[stream] = body[size:]
            self.h2.send_data(stream, body[:size], end_stream=size == len(body))
            if size == len(body):
                del self.unsent[stream]
        return self.h2.data_to_send()

    def hear(self, raw: bytes) -> None:
        for event in self.h2.receive_data(raw):
            if isinstance(event, ResponseReceived | TrailersReceived):
                assert event.headers is not None
                assert event.stream_id is not None
                self.replies[event.stream_id].append(tuple(tuple(pair) for pair in event.headers))
            elif isinstance(event, DataReceived):
                assert event.stream_id is not None
                assert event.flow_controlled_length is not None
                self.bodies[event.stream_id] += event.data or b""
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                assert event.stream_id is not None
                self.ended.add(event.stream_id)
            elif isinstance(event, StreamReset | ConnectionTerminated):
                self.others.append(event)


@pytest.mark.parametrize("cut", [lambda raw: [raw], in_bytes, in_pieces])
def test_calls_of_another_client_come_back_many_at_a_time(cut: Cut) -> None:
    calls, server = StrangeCalls(), EchoingServer(cut)
    expected = {}
    for number in range(12):
        message = random.Random(number).randbytes([0, 10, 70_000][number % 3])
        metadata = (("x-number", str(number // 4)), ("x-raw-bin", "AP8"))
        expected[calls.begin(message, *metadata)] = (message, metadata)
    for _ in range(100):
        calls.hear(server.heard(calls.say()))
    assert calls.ended == set(expected)
    assert calls.others == []
    head = reply_headers([("x-first", "1")])
    for stream, (message, metadata) in expected.items():
        assert calls.bodies[stream] == framed([message])
        trailers = (("grpc-status", "0"), ("grpc-message", "/tei.v1.Embed/Embed"), *metadata)
        assert calls.replies[stream] == [head, trailers]
    assert server.protocol.streams == {}


def test_another_client_takes_refusals_resets_and_goodbyes_as_they_are_meant() -> None:
    calls, server = StrangeCalls(), EchoingServer(lambda raw: [raw])
    first, second, third = calls.begin(b"1"), calls.begin(b"2"), calls.begin(b"3")
    server.protocol.receive(calls.h2.data_to_send())
    server.protocol.end_at_once(first, ((":status", "200"), ("grpc-status", "8")))
    server.protocol.reset(second, REFUSED_STREAM)
    server.protocol.go_away()
    calls.hear(bytes(server.protocol.data_to_send()))
    assert calls.replies[first] == [((":status", "200"), ("grpc-status", "8"))]
    assert first in calls.ended
    resets = [(event.stream_id, event.error_code) for event in calls.others if isinstance(event, StreamReset)]
    assert resets == [(first, 0), (second, REFUSED_STREAM)]
    (goodbye,) = [event for event in calls.others if isinstance(event, ConnectionTerminated)]
    assert (goodbye.last_stream_id, goodbye.error_code) == (third, 0)


@pytest.mark.parametrize("key", ["x-\udcff", "x-ä", ":path"])
def test_headers_that_are_no_text_can_be_passed_on_as_they_came(key: str) -> None:
    """A stranger sends any bytes, and a relay gives them to our own client."""
    headers = ((":method", "POST"), (key, "\udcff\udcfe"))
    caller, further = RawCaller(), ClientConnection()
    raw = b"\x83\x10" + b"".join(string_literal(each.encode("utf-8", "surrogateescape")) for each in headers[1])
    (event,) = caller.say(frame(HEADERS, END_HEADERS, 1, raw))
    assert event == StreamOpened(1, headers, False)
    further.open(*((headers, ()) if key == ":path" else (headers[:1], headers[1:])))
    (event,) = ServerConnection().receive(bytes(further.data_to_send()))
    assert event == StreamOpened(1, headers, False)


# -- bytes as they come ------------------------------------------------------------------------------------------------


def conversation() -> bytes:
    caller = RawCaller()
    block = caller.block_of((*REQUEST, ("x-long", "v" * 40)))
    return b"".join(
        [
            frame(HEADERS, 0x8, 1, b"\x02" + block[:7] + bytes(2)) + frame(9, END_HEADERS, 1, block[7:]),
            caller.open(3) + frame(PING, 0, 0, b"8 bytes!") + frame(0x42, 0, 5, b"unknown"),
            caller.data(1, b"some") + caller.data(3, b"other") + frame(DATA, 0x8, 1, b"\x05padded" + bytes(5)),
            caller.settings((4, 5), (5, 20_000)) + caller.grant(0, 1000) + caller.grant(3, 1000),
            caller.open(5, end=True) + caller.data(3, b"", end=True) + caller.reset(1, 7),
            caller.open(7) + caller.open(7, (("x-end", "1"),), end=True) + frame(GOAWAY, 0, 0, bytes(8)),
        ]
    )


def broken() -> bytes:
    caller = RawCaller()
    return caller.open(1) + caller.data(1, b"data") + frame(9, END_HEADERS, 1, b"") + caller.data(1, b"no")


@pytest.mark.parametrize("talk", [conversation, broken])
def test_the_same_bytes_give_the_same_events_and_answers_wherever_they_are_cut(talk: Callable[[], bytes]) -> None:
    raw = PREFACE + frame(SETTINGS, 0, 0, b"") + talk()

    def heard(pieces: Iterable[bytes]) -> tuple[list[ServerEvent], bytes]:
        server = ServerConnection()
        events = [event for piece in pieces for event in server.receive(piece)]
        for stream in (3, 5, 7):
            server.reply(stream, ((":status", "200"),), b"a reply", (("grpc-status", "0"),))
        return events, bytes(server.data_to_send())

    whole = heard([raw])
    assert len(whole[0]) == (10 if talk is conversation else 3)
    assert heard(in_bytes(raw)) == whole
    for at in range(len(raw)):
        assert heard([raw[:at], raw[at:]]) == whole
    for at in range(0, len(raw), 17):
        for further in range(at, len(raw), 11):
            assert heard([raw[:at], raw[at:further], b"", raw[further:]]) == whole


def test_a_frame_that_comes_in_many_pieces_is_put_together_once() -> None:
    caller = RawCaller()
    caller.say(caller.open(1))
    caller.server.grant(1, OUR_FRAME_SIZE)
    raw = caller.data(1, bytes(OUR_FRAME_SIZE))
    for at in range(0, len(raw), 1000):
        assert caller.server.incomplete.join(b"") == b""  # nothing is looked at again
        events = caller.say(raw[at : at + 1000])
    assert events == [StreamData(1, bytes(OUR_FRAME_SIZE), OUR_FRAME_SIZE, False)]
    assert not caller.server.incomplete.begun
