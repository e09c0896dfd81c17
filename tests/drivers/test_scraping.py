"""A replica's metrics page: its text, or None within the time, whatever is at the port."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from appliance.drivers.scraping import metrics_page, metrics_pages

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nte_a 1\n\xff"
REPLIES: dict[str, tuple[bytes, str | None]] = {
    "a page, with a byte that is no UTF-8": (PAGE, "te_a 1\n\N{REPLACEMENT CHARACTER}"),
    "a page without a length": (PAGE.replace(b"Content-Length: 8\r\n", b""), "te_a 1\n\N{REPLACEMENT CHARACTER}"),
    "a page in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nte_a \r\n3;x=y\r\n1\n\xff\r\n0\r\n\r\n",
        "te_a 1\n\N{REPLACEMENT CHARACTER}",
    ),
    "half of its chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nte_a \r\n", None),
    "half a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nte_", None),
    "a length in another spelling": (
        PAGE.replace(b"Content-Length: 8", b"content-length:8 "),
        "te_a 1\n\N{REPLACEMENT CHARACTER}",
    ),
    "more than its length": (PAGE + b"te_b 1\n", "te_a 1\n\N{REPLACEMENT CHARACTER}"),
    "half a head": (PAGE[:20], None),
    "another page": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", None),
    "half a page": (PAGE[:-3], None),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", None),
    "nothing": (b"", None),
}


def answering(reply: bytes | None) -> tuple[socket.socket, threading.Thread]:
    """A listener, and the thread that answers one request with this; None: it says nothing until it is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(65536).startswith(b"GET /metrics HTTP/1.1\r\n")
            if reply is None:
                connection.recv(1)  # until the client has given up
            else:
                connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    return listener, thread


@pytest.mark.parametrize("case", REPLIES)
def test_the_text_or_none(case: str) -> None:
    reply, expected = REPLIES[case]
    listener, thread = answering(reply)
    with listener:
        assert metrics_page(listener.getsockname()[1], 5) == expected
        thread.join()


def test_a_page_that_does_not_come_is_none_in_time() -> None:
    listener, thread = answering(None)
    with listener:
        began = time.monotonic()
        assert metrics_page(listener.getsockname()[1], 0.2) is None
        assert time.monotonic() - began < 5
        thread.join()


def test_where_nothing_listens_there_is_no_page() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert metrics_page(port, 5) is None


def test_pages_are_those_of_their_ports_also_beside_some_that_do_not_come() -> None:
    """All are asked before the first is read, so they need not answer in order."""
    with ExitStack() as held:
        ports, threads = [], []
        for reply in (None, PAGE, b"", None, PAGE.replace(b"te_a", b"te_b")):
            listener, thread = answering(reply)
            held.enter_context(listener)
            ports.append(listener.getsockname()[1])
            threads.append(thread)
        expected = REPLIES["a page, with a byte that is no UTF-8"][1]
        assert metrics_pages(ports, 1.0) == [None, expected, None, None, str(expected).replace("te_a", "te_b")]
        for thread in threads:
            thread.join()
    assert metrics_pages([], 1.0) == []
