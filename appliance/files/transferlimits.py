"""Time limits for what an HTTP client sends and takes: who is too slow loses the connection.

gunicorn's sockets have no timeout (27.0): such a client would hold a thread for ever.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from appliance.core import fields as check

GRACE_SECS = 10.0  # for the head of a request, and in addition to the time of a body or an answer
SLOWEST_BYTES = 64 * 1024  # bytes of a body or an answer that a client must take or send in a second
# Of a body that nobody wants gunicorn (27.0) reads less than twice that, and then ends the connection: its client has
# to be told with the answer, or he sends his next request there.
SKIPPED_BYTES = 32 * 1024
TICK_SECS = 0.25
App = Callable[[dict[str, Any], Any], Iterable[bytes]]  # of WSGI


class Deadline(NamedTuple):
    """until: by time.monotonic; client(): the socket that is shut down then."""

    until: float
    client: Callable[[], socket.socket]


class TransferLimits:
    """The transfers in progress, each with a deadline. One thread shuts down the connections that miss theirs."""

    def __init__(self) -> None:
        self.deadlines: dict[int, Deadline] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        self.started = False

    def begin(self, client: Callable[[], socket.socket], size: int = 0) -> int:
        """Shut the connection down unless `end` is called within the time that ``size`` bytes may take."""
        number = next(self.numbers)
        with self.lock:
            self.deadlines[number] = Deadline(time.monotonic() + GRACE_SECS + size / SLOWEST_BYTES, client)
            if not self.started:  # only now: a thread does not survive gunicorn's fork
                self.started = True
                threading.Thread(target=self.watch, name="transfer-limits", daemon=True).start()
        return number

    def end(self, number: int) -> None:
        with self.lock:
            self.deadlines.pop(number, None)

    @contextmanager
    def limited(self, client: socket.socket, size: int) -> Iterator[None]:
        number = self.begin(lambda: client, size)
        try:
            yield
        finally:
            self.end(number)

    def watch(self) -> None:
        while True:
            time.sleep(TICK_SECS)
            now = time.monotonic()
            with self.lock:
                late = [deadline.client for deadline in self.deadlines.values() if deadline.until < now]
            for client in late:
                try:
                    # Not the method of an SSLSocket, which would go on in clear text.
                    socket.socket.shutdown(client(), socket.SHUT_RDWR)
                except OSError:
                    pass  # the client has disconnected


LIMITS = TransferLimits()  # of this worker process


class LimitedInput:
    """`wsgi.input` with a time limit for each read. unread: bytes of the body at most."""

    def __init__(self, raw: Any, client: socket.socket, length: int | None) -> None:
        """length: of the whole body; None: it comes in chunks."""
        self.raw, self.client, self.length = raw, client, length
        self.unread = math.inf if length is None else length

    def read(self, size: int = -1) -> bytes:
        expected = min([each for each in (size, self.length) if each is not None and each >= 0], default=0)
        with LIMITS.limited(self.client, expected):
            body: bytes = self.raw.read(size)
        self.unread = 0 if size < 0 or len(body) < size else self.unread - len(body)
        return body


def time_limited(app: App) -> App:
    """The app with time limits for reading its requests and sending its answers."""

    def limited_app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        client = environ["gunicorn.socket"]
        length = None if "HTTP_TRANSFER_ENCODING" in environ else check.decimal(environ.get("CONTENT_LENGTH") or "0")
        environ["wsgi.input"] = body = LimitedInput(environ["wsgi.input"], client, length)

        def start(*answer: Any) -> Any:
            if body.unread > SKIPPED_BYTES:
                start_response.__self__.force_close()
            return start_response(*answer)

        return sent(app(environ, start), client)

    return limited_app


def sent(chunks: Iterable[bytes], client: socket.socket) -> Iterator[bytes]:
    """The chunks, each with a time limit: the server sends a chunk before it takes the next one."""
    try:
        for chunk in chunks:
            with LIMITS.limited(client, len(chunk)):
                yield chunk
    finally:
        if close := getattr(chunks, "close", None):
            close()
