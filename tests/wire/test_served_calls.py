"""Calls as their server reads and answers them: what is plain, deadlines, metadata, statuses."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.wire.calls import CallFailed, ClientCall, Code, Status, framed, timeout_header
from appliance.wire.http2 import DataReceived, HeadersReceived
from appliance.wire.http2_headers import HeaderTuple
from appliance.wire.served_calls import (
    OK,
    REPLY_BEGIN,
    only_message,
    reply_headers,
    request_of,
    status_trailers,
    trailers_only,
)
from testing.specs import LAW
from tests.wire.callers import REQUEST


def with_header(key: str, value: str) -> HeaderTuple:
    """A plain request with this header, instead of the one of its name."""
    return (*[pair for pair in REQUEST if pair[0] != key], (key, value))


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_is_its_path_and_what_its_caller_added() -> None:
    headers = (
        *REQUEST,
        ("host", "elsewhere"),
        ("grpc-timeout", "2S"),
        ("grpc-accept-encoding", "gzip"),
        ("user-agent", "x/1"),
        ("x-word", "1"),
        ("x-word", "2"),
        ("x-raw-bin", "AP8"),
    )
    request = request_of(headers)
    assert request.headers is headers
    assert request.path == "/tei.v1.Embed/Embed"
    metadata = (("user-agent", "x/1"), ("x-word", "1"), ("x-word", "2"), ("x-raw-bin", b"\x00\xff"))
    assert request.metadata == metadata
    assert (request.timeout_secs, request.is_plain) == (2.0, True)


def test_the_same_headers_are_read_once() -> None:
    assert request_of(tuple(REQUEST)) is request_of((*REQUEST,))


@pytest.mark.parametrize(
    ("value", "secs"),
    [
        ("1H", 3600.0),
        ("2M", 120.0),
        ("3S", 3.0),
        ("4m", 0.004),
        ("5u", 0.000005),
        ("6n", 0.000000006),
        ("0S", 0.0),
        ("00000007S", 7.0),
        ("99999999H", 99999999 * 3600.0),
    ],
)
def test_a_timeout_has_six_units(value: str, secs: float) -> None:
    request = request_of(with_header("grpc-timeout", value))
    assert request.timeout_secs == pytest.approx(secs, rel=1e-12)
    assert request.is_plain


@pytest.mark.parametrize(
    "value", ["1", "S", "1s", "-1S", "+1S", "1.5S", "1 S", " 1S", "1S ", "123456789S", "1S\n", "٣S"]
)
def test_a_timeout_that_is_none_is_not_for_us_to_answer(value: str) -> None:
    request = request_of(with_header("grpc-timeout", value))
    assert (request.timeout_secs, request.is_plain) == (None, False)


def test_without_a_timeout_a_caller_waits_for_ever() -> None:
    assert request_of(REQUEST).timeout_secs is None
    assert request_of(REQUEST).is_plain


@LAW
@given(st.floats(0, 10**7))
def test_the_timeouts_of_our_own_client_are_read_as_they_were_meant(secs: float) -> None:
    read = request_of(with_header("grpc-timeout", timeout_header(secs))).timeout_secs
    assert read is not None
    assert secs <= read <= secs + (0.0021 if secs < 99_000 else 1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (":method", "GET"),
        (":method", "PUT"),
        ("content-type", "application/grpc+proto"),
        ("content-type", "application/grpc-web"),
        ("content-type", "application/json"),
        ("content-type", ""),
        ("grpc-encoding", "gzip"),
        ("x-umlaut", "ä"),
        ("x-umlaut", "\udcff"),
        ("x-umläut", "a"),
        ("X-Word", "1"),
        ("x-raw-bin", "A"),
        ("x-raw-bin", "ä"),
    ],
)
def test_what_is_not_plain_is_for_the_grpc_library(key: str, value: str) -> None:
    assert not request_of(with_header(key, value)).is_plain


@pytest.mark.parametrize("key", [":method", "content-type"])
def test_a_request_that_lacks_something_is_not_plain(key: str) -> None:
    assert not request_of(tuple(pair for pair in REQUEST if pair[0] != key)).is_plain


@pytest.mark.parametrize(
    ("key", "value"), [("grpc-encoding", "identity"), ("grpc-accept-encoding", "gzip"), ("x-word", ""), ("te", "x")]
)
def test_what_is_plain_may_have_these(key: str, value: str) -> None:
    assert request_of(with_header(key, value)).is_plain


@pytest.mark.parametrize("headers", [(), (("", ""),), (("", "value"), *REQUEST), ((":path", ""),)])
def test_a_stranger_may_send_any_headers(headers: HeaderTuple) -> None:
    """HPACK lets a name be empty."""
    assert not request_of(headers).is_plain


@LAW
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8))))
def test_whatever_the_headers_are_they_can_be_read(headers: list[tuple[str, str]]) -> None:
    request = request_of((*REQUEST, *headers))
    assert request.path or any(key == ":path" for key, _ in headers)


@LAW
@given(st.binary(max_size=40), st.booleans())
def test_binary_metadata_is_base64_with_or_without_padding(raw: bytes, padded: bool) -> None:
    coded = base64.b64encode(raw).decode()
    request = request_of(with_header("x-raw-bin", coded if padded else coded.rstrip("=")))
    assert request.metadata == (("x-raw-bin", raw),)
    assert request.is_plain


# -- replies -----------------------------------------------------------------------------------------------------------


def answered(*events: HeadersReceived | DataReceived) -> tuple[list[bytes], ClientCall, Status]:
    """What our own client makes of a reply."""
    call = ClientCall()
    messages: list[bytes] = []
    try:
        messages += call.messages(events)
    except CallFailed as failure:
        return messages, call, failure.status
    assert call.status is not None
    return messages, call, call.status


def test_a_reply_is_read_by_our_own_client_with_metadata_at_both_ends() -> None:
    head = reply_headers([("x-first", "1"), ("x-first-bin", b"\x00\xff")])
    assert head[:2] == ((":status", "200"), ("content-type", "application/grpc"))
    end = status_trailers(0, "", [("x-last", "2"), ("x-last-bin", b"\xff")])
    assert end == (("grpc-status", "0"), ("x-last", "2"), ("x-last-bin", "/w"))
    events = (
        HeadersReceived(list(head), ends=False),
        DataReceived(framed([b"message"]), ends=False),
        HeadersReceived(list(end), ends=True),
    )
    messages, call, status = answered(*events)
    assert messages == [b"message"]
    assert call.headers == [("x-first", "1"), ("x-first-bin", b"\x00\xff")]
    assert status == Status(Code.OK, "", [("x-last", "2"), ("x-last-bin", b"\xff")])


def test_a_reply_that_adds_nothing_is_always_the_same() -> None:
    assert reply_headers(()) == REPLY_BEGIN
    assert status_trailers(0, "", ()) == OK


DETAILS = {
    "plain words, with (all) of ASCII's marks: !\"#$&'*+,-./:;<=>?@[\\]^_`{|}~": None,
    "100% of it": "100%25 of it",
    "%41": "%2541",
    "two\nlines\r\n": "two%0Alines%0D%0A",
    "tab\t nul\0 delete\x7f": "tab%09 nul%00 delete%7F",
    "stärke": "st%C3%A4rke",
    "日本 😀": "%E6%97%A5%E6%9C%AC %F0%9F%98%80",
    " blanks ": None,
}


@pytest.mark.parametrize("details", DETAILS)
def test_the_words_of_a_status_travel_percent_encoded(details: str) -> None:
    trailers = status_trailers(3, details, ())
    assert trailers == (("grpc-status", "3"), ("grpc-message", DETAILS[details] or details))
    assert answered(HeadersReceived(list(trailers), ends=True))[2] == Status(3, details, [])


@LAW
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_whatever_the_words_are_they_arrive_as_they_were_in_ascii_that_a_header_may_have(details: str) -> None:
    trailers = status_trailers(13, details, ())
    assert all(" " <= char <= "~" for _, value in trailers for char in value)
    assert answered(HeadersReceived(list(trailers), ends=True))[2] == Status(13, details, [])


def test_words_that_are_no_text_do_not_keep_a_status_from_its_caller() -> None:
    """What was not UTF-8 when it came is quoted in an error as Python keeps it."""
    trailers = status_trailers(3, "unknown: \udcff", [("x-why", "1")])
    assert (trailers[0], trailers[-1]) == (("grpc-status", "3"), ("x-why", "1"))
    assert trailers[1][1].isascii()


@pytest.mark.parametrize("code", [*Code, 99])
def test_a_reply_that_is_its_end_alone_has_code_words_and_metadata(code: int) -> None:
    headers = trailers_only(status_trailers(code, "why", [("x-raw-bin", b"\xff")]))
    assert headers[:2] == ((":status", "200"), ("content-type", "application/grpc"))
    messages, call, status = answered(HeadersReceived(list(headers), ends=True))
    assert (messages, call.headers) == ([], [])
    assert status == Status(code, "why", [("x-raw-bin", b"\xff")])


# -- messages ----------------------------------------------------------------------------------------------------------


@LAW
@given(st.binary(max_size=300))
def test_a_message_is_framed_as_our_own_client_does_and_read_again(message: bytes) -> None:
    assert only_message(framed([message])) == message
    assert only_message(bytearray(framed([message]))) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0\0",
        framed([b"cut short"])[:-1],
        framed([b"one"]) + framed([b"two"]),
        framed([b"one"]) + b"\0",
        b"\1" + framed([b"compressed"])[1:],
        b"\2" + framed([b"no flag that there is"])[1:],
        b"\0\xff\xff\xff\xff" + b"shorter than it says",
    ],
)
def test_a_body_that_is_not_one_message_is_for_the_grpc_library(body: bytes) -> None:
    assert only_message(body) is None


def test_a_message_is_a_copy_that_later_data_does_not_change() -> None:
    body = bytearray(framed([b"message"]))
    message = only_message(body)
    body[-1:] = b"?"
    assert message == b"message"
