"""gunicorn's thread worker, with its own refusals in our shape: what is no HTTP request is answered in JSON too."""

from __future__ import annotations

import socket
from typing import Any

from gunicorn.http import errors as http
from gunicorn.workers.gthread import ThreadWorker

from appliance.control.errors import body

REASONS = {400: "Bad Request", 414: "URI Too Long", 431: "Request Header Fields Too Large", 501: "Not Implemented"}
CODES = {400: "BAD_REQUEST", 414: "URI_TOO_LONG", 431: "HEADERS_TOO_LARGE", 501: "NOT_IMPLEMENTED"}
STATUS = (
    (http.LimitRequestLine, 414),
    (http.LimitRequestHeaders, 431),
    (http.UnsupportedTransferCoding, 501),
)


class JsonThreadWorker(ThreadWorker):  # type: ignore[misc]
    """As gthread, but what is no HTTP gets the contract's error body."""

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        status = next((status for kind, status in STATUS if isinstance(exc, kind)), 400)
        text = body(f"The request cannot be read: {type(exc).__name__} {exc}".strip(), CODES[status]).encode()
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        try:
            client.sendall(head.encode() + text)
        except OSError:
            self.log.debug("The client was gone before it could be told: %s", exc)
