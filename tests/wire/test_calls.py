"""gRPC calls as events of their stream: messages, metadata, and how they end."""

import struct

import pytest

from appliance.wire.calls import CallFailed, ClientCall, Code, Status, framed, metadata_headers
from appliance.wire.http2 import (
    DataReceived,
    HeadersReceived,
    ProtocolViolated,
    StreamEvent,
    StreamReset,
    StreamUnprocessed,
)

HEAD = HeadersReceived([(":status", "200"), ("content-type", "application/grpc")], ends=False)
OK = HeadersReceived([("grpc-status", "0")], ends=True)


def outcome(*events: StreamEvent) -> tuple[list[bytes], CallFailed]:
    """(messages before it, how the call failed)"""
    messages: list[bytes] = []
    try:
        messages.extend(message for message in ClientCall().messages(events))
    except CallFailed as failure:
        return messages, failure
    raise AssertionError("the call did not fail")


def trailers(*headers: tuple[str, str]) -> HeadersReceived:
    return HeadersReceived([(":status", "200"), *headers], ends=True)


def test_messages_are_cut_from_data_wherever_that_is_cut() -> None:
    sent = [b"one", b"", b"x" * 300, b"two"]
    raw = framed(sent)
    for at in range(len(raw) + 1):
        for further in range(at, len(raw) + 1, 11):
            pieces = (raw[:at], raw[at:further], raw[further:])
            call = ClientCall()
            events: list[StreamEvent] = [HEAD, *(DataReceived(piece, ends=False) for piece in pieces), OK]
            assert list(call.messages(events)) == sent
            assert call.status == Status(Code.OK, "", [])


def test_a_message_that_comes_in_many_pieces_is_put_together_once() -> None:
    raw = framed([bytes(2**20)])
    call = ClientCall()
    for at in range(0, len(raw), 16384):
        found = list(call.messages([DataReceived(raw[at : at + 16384], ends=False)]))
        assert len(call.incomplete.begun) == (0 if found else min(at + 16384, len(raw)))
    assert found == [bytes(2**20)]


def test_metadata_goes_both_ways_text_and_binary() -> None:
    call = ClientCall()
    head = HeadersReceived([*HEAD.headers, ("x-first", "1"), ("x-first-bin", "AP8")], ends=False)
    assert list(call.messages([head, trailers(("grpc-status", "0"), ("x-last-bin", "AP8="))])) == []
    assert call.headers == [("x-first", "1"), ("x-first-bin", b"\x00\xff")]
    assert call.status == Status(Code.OK, "", [("x-last-bin", b"\x00\xff")])
    assert metadata_headers([("x-raw-bin", b"\x00\xff"), ("x-word", "1")]) == [("x-raw-bin", "AP8"), ("x-word", "1")]


def test_trailers_only_carry_code_words_and_metadata() -> None:
    end = trailers(("grpc-status", "9"), ("grpc-message", "st%C3%A4rke"), ("grpc-status-details-bin", "AP8"))
    messages, failure = outcome(end)
    assert messages == []
    assert failure.status == Status(9, "stärke", [("grpc-status-details-bin", b"\x00\xff")])
    assert (failure.answered, failure.begun) == (True, True)


@pytest.mark.parametrize(("sent", "code"), [("99", 99), ("nine", Code.INTERNAL), ("-1", Code.INTERNAL)])
def test_a_status_that_nobody_knows_is_a_failure_all_the_same(sent: str, code: int) -> None:
    assert outcome(trailers(("grpc-status", sent)))[1].status.code == code


def test_an_end_without_a_status_is_a_failure_of_the_transport() -> None:
    messages, failure = outcome(HEAD, DataReceived(framed([b"one"]), ends=True))
    assert messages == [b"one"]
    assert failure.status == Status(Code.UNAVAILABLE, "the call ended without a status", [])
    assert not failure.answered


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("number", "code"), [("502", Code.UNAVAILABLE), ("404", Code.UNIMPLEMENTED)])
def test_an_answer_that_is_plain_http_is_named_by_its_status(number: str, code: Code, ends: bool) -> None:
    events = (HeadersReceived([(":status", number)], ends), DataReceived(b"", ends=True))
    failure = outcome(*events)[1]
    assert (failure.status.code, failure.status.details) == (code, f"HTTP status {number}")
    assert not failure.answered


@pytest.mark.parametrize(("number", "code"), [(7, 14), (8, 1), (11, 8), (2, 13), (99, 13)])
def test_a_reset_fails_the_call_after_the_messages_that_came_before_it(number: int, code: int) -> None:
    messages, failure = outcome(HEAD, DataReceived(framed([b"one", b"two"])[:-1], ends=False), StreamReset(number))
    assert messages == [b"one"]
    assert (failure.status.code, failure.answered, failure.begun) == (code, False, True)


def test_a_call_that_the_server_has_not_looked_at_has_not_begun() -> None:
    failure = outcome(StreamUnprocessed())[1]
    assert (failure.status.code, failure.answered, failure.begun) == (Code.UNAVAILABLE, False, False)


def test_a_broken_protocol_is_an_internal_failure() -> None:
    failure = outcome(HEAD, ProtocolViolated("unreadable headers"))[1]
    assert (failure.status.code, failure.status.details, failure.answered) == (13, "unreadable headers", False)


def test_a_compressed_message_is_refused_after_those_before_it() -> None:
    raw = framed([b"one"]) + struct.pack(">BI", 1, 1) + b"x"
    messages, failure = outcome(HEAD, DataReceived(raw, ends=False))
    assert messages == [b"one"]
    assert (failure.status.code, failure.answered) == (Code.INTERNAL, False)
