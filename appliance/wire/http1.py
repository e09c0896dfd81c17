"""What a server of HTTP/1.1 does without a thread: see whether all of a request has come, and refuse what is none."""

from __future__ import annotations

import re

REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}
CRLF = b"\r\n"
HEAD_END = CRLF * 2
LONGEST_LINE = 4094  # of gunicorn
REQUEST_LINE = re.compile(rb"[!#-'*+.^_`|~\w-]+ ([^ \r\n]+) HTTP/\d\.\d\r\n", re.ASCII)
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
EXPECT = re.compile(rb"\r\nexpect:", re.IGNORECASE)


def request_size(data: bytes, most: int) -> int | None:
    """The bytes of the request that ``data`` begins with, its body included; None: they do not tell it yet.

    What will never be a request is as large as it is now, so that its client is told at once. The head alone counts
    where it may be answered before the body is there: that comes in chunks, or the client expects a word first, or all
    of it would be more than ``most`` bytes.
    """
    begin = len(CRLF) if data.startswith(CRLF) else 0  # gunicorn skips one of them
    end = data.find(HEAD_END, begin)
    if end < 0:
        return None if may_become(data[begin:]) else len(data)
    head = data[: end + len(CRLF)]
    length = LENGTH.search(head)
    size = end + len(HEAD_END)
    whole = size + (int(length[1]) if length and not EXPECT.search(head) else 0)
    return whole if whole <= most else size


def path_of(request: bytes) -> str:
    """Without its query; empty where it is no request."""
    found = REQUEST_LINE.match(request.removeprefix(CRLF))
    return found[1].partition(b"?")[0].decode("latin-1") if found else ""


def may_become(head: bytes) -> bool:
    """Whether a head that has not come whole may be that of a request."""
    if b"\n" not in head:
        return len(head) <= LONGEST_LINE
    return bool(REQUEST_LINE.match(head)) and head.count(b"\n") == head.count(CRLF)


def last_answer(status: int, kind: str, text: str) -> bytes:
    """An answer after which the connection ends. kind: of content."""
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
