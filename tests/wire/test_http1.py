"""How much of a request has come."""

import pytest

from appliance.wire.http1 import last_answer, path_of, request_size

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
MOST = 1000
LARGE = b"POST / HTTP/1.1\r\nContent-Length: 970\r\n\r\n"
POST = b"POST /embed HTTP/1.1\r\ncontent-LENGTH:  12 \r\n\r\n"


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (GET, len(GET)),
        (GET + GET, len(GET)),
        (b"\r\n" + GET, 2 + len(GET)),
        (POST, len(POST) + 12),
        (POST + b"12 bytes, yes", len(POST) + 12),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n", 47),
        (b"POST / HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", 60),
        (LARGE, len(LARGE)),
        (b"GET / HTTP/1.1\r\nX-Content-Length: 9\r\n\r\n", 39),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 18),
    ],
    ids=[
        "get",
        "two",
        "an empty line",
        "a body to come",
        "with its body",
        "chunks",
        "expect",
        "large",
        "another header",
        "HTTP/2",
    ],
)
def test_a_whole_head_tells_how_long_the_request_is(data: bytes, size: int) -> None:
    assert request_size(data, MOST) == size


@pytest.mark.parametrize("whole", [GET, POST, b"\r\n" + GET])
def test_no_part_of_a_head_tells_it(whole: bytes) -> None:
    assert {request_size(whole[:size], MOST) for size in range(len(whole))} == {None}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n",
        b"\r\n\r\n",
        b"\n",
        b"GET /\r\n",
        b"GET  / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\r\nHost: a\nX",
        b"GET /" + b"a" * 4090,
        b"\x16\x03\x01\x02\n",
    ],
)
def test_what_will_never_be_a_request_is_not_waited_for(data: bytes) -> None:
    assert request_size(data, MOST) == len(data)


def test_a_last_answer_is_as_long_as_it_says() -> None:
    head, _, body = last_answer(403, "text/plain", "nö").partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 403 Forbidden"
    assert b"Content-Length: 3" in head
    assert body == "nö".encode()


@pytest.mark.parametrize(
    ("data", "path"),
    [(GET, "/health"), (b"\r\n" + GET, "/health"), (b"GET /a/b?c=/d HTTP/1.1\r\n\r\n", "/a/b"), (b"nonsense\r\n", "")],
)
def test_a_datahas_a_path(data: bytes, path: str) -> None:
    assert path_of(data) == path
