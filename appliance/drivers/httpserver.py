"""What every HTTP server of ours has: gunicorn's thread workers, its refusals in our shape, and patience with an end.

A client that sends its head or body too slowly, or does not read its answer, loses its connection instead of holding
a thread for ever: gunicorn's sockets have no timeout of their own (27.0).
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.http import errors as http
from gunicorn.http import get_parser
from gunicorn.workers.gthread import ThreadWorker

from appliance.core import fields as check

REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}
STATUS = (
    (http.LimitRequestLine, 414),
    (http.LimitRequestHeaders, 431),
    (http.UnsupportedTransferCoding, 501),
)
TOLD = (http.LimitRequestLine, http.LimitRequestHeaders)
PATIENCE_SECS = 10.0  # for a request's head, and on top of what a body or an answer takes
SLOWEST_BYTES = 64 * 1024  # a second, of a body or an answer
TICK_SECS = 0.25

# (status, what is wrong) -> (content type, body): how a program answers what is no HTTP request.
Refusal = Callable[[int, str], tuple[str, str]]
App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Patience:
    """Connections that must get on with it. One thread shuts down those that did not in time."""

    def __init__(self) -> None:
        self.limits: dict[int, tuple[float, Callable[[], socket.socket]]] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        self.started = False

    def begin(self, client: Callable[[], socket.socket], size: int = 0) -> int:
        """Shut the connection down unless `end` is called in the time that ``size`` bytes may take."""
        number = next(self.numbers)
        with self.lock:
            self.limits[number] = (time.monotonic() + PATIENCE_SECS + size / SLOWEST_BYTES, client)
            if not self.started:  # not earlier: a thread does not survive gunicorn's fork
                self.started = True
                threading.Thread(target=self.watch, name="patience", daemon=True).start()
        return number

    def end(self, number: int) -> None:
        with self.lock:
            self.limits.pop(number, None)

    @contextmanager
    def over(self, client: socket.socket, size: int) -> Iterator[None]:
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
                late = [client for until, client in self.limits.values() if until < now]
            for client in late:
                try:
                    # Not the method of an SSLSocket, which would go on in clear text.
                    socket.socket.shutdown(client(), socket.SHUT_RDWR)
                except OSError:
                    pass  # it went by itself


PATIENCE = Patience()  # one in each worker process


class PatientInput:
    """`wsgi.input` with an end to each read."""

    def __init__(self, raw: Any, client: socket.socket, length: int) -> None:
        self.raw, self.client, self.length = raw, client, length

    def read(self, size: int = -1) -> bytes:
        expected = min(size, self.length) if size >= 0 else self.length
        with PATIENCE.over(self.client, expected):
            found: bytes = self.raw.read(size)
            return found


def patient(app: App) -> App:
    """The app, with an end to the reading of its requests and to the sending of its answers."""

    def patiently(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        client = environ["gunicorn.socket"]
        length = check.decimal(environ.get("CONTENT_LENGTH", "")) or 0
        environ["wsgi.input"] = PatientInput(environ["wsgi.input"], client, length)
        return sent(app(environ, start_response), client)

    return patiently


def sent(chunks: Iterable[bytes], client: socket.socket) -> Iterator[bytes]:
    """The chunks as they are; the server sends each before it asks for the next."""
    try:
        for chunk in chunks:
            with PATIENCE.over(client, len(chunk)):
                yield chunk
    finally:
        if close := getattr(chunks, "close", None):
            close()


class Worker(ThreadWorker):  # type: ignore[misc]
    """As gthread, with an end to the reading of a request's head, and with ``refusal`` for what is no HTTP."""

    refusal: Refusal

    def accept(self, listener: Any) -> None:
        try:
            super().accept(listener)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.log.error("No file descriptor is left for another connection; it waits until one ends")
            time.sleep(TICK_SECS)

    def enqueue_req(self, conn: Any) -> None:
        """A connection through a unix socket speaks no TLS."""
        if conn.parser is None and conn.sock.family == socket.AF_UNIX:
            # What has a parser is not wrapped in TLS (gunicorn 27.0), which could ask for a certificate.
            conn.parser = get_parser(conn.cfg, conn.sock, conn.client)
        self.enqueue(conn)

    def enqueue(self, conn: Any) -> None:
        """A new connection waits for its first bytes without a thread. gunicorn gives it one, for 5 s, and then waits
        for 30 s more: 32 clients that connect and say nothing kept control from everybody else."""
        if conn.initialized or conn.data_ready:
            super().enqueue_req(conn)
            return
        conn.timeout = time.monotonic() + PATIENCE_SECS
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def handle(self, conn: Any) -> Any:
        conn.head = PATIENCE.begin(lambda: conn.sock)
        try:
            return super().handle(conn)
        finally:
            PATIENCE.end(conn.head)

    def handle_request(self, req: Any, conn: Any) -> Any:
        PATIENCE.end(conn.head)
        return super().handle_request(req, conn)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        status = next((status for kind, status in STATUS if isinstance(exc, kind)), 400)
        told = f" {exc}" if isinstance(exc, TOLD) else ""  # the others repeat what was sent, and that may be a key
        words = f"The request cannot be read: {type(exc).__name__}{told}"
        if isinstance(exc, ssl.SSLError):
            status, words = 403, str(exc.args[-1])
        kind, text = self.refusal(status, words)
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n"
        )
        try:
            client.sendall((head + text).encode())
        except OSError:
            self.log.debug("The client was gone before it could be told: %s", exc)


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn configured from our settings alone: no file, no GUNICORN_CMD_ARGS.

    make_app is called in each worker, after the fork.
    """

    def __init__(
        self,
        name: str,
        address: str,
        workers: int,
        threads: int,
        make_app: Callable[[], App],
        refusal: Refusal,
        tls: tuple[str, str, Callable[[], ssl.SSLContext]] | None = None,
        grace_secs: int = 10,
        own_socket: Path | None = None,
    ) -> None:
        """tls: certificate file, key file, and what gives the context of each new connection.

        grace_secs: how long requests in work may take to end when the server is stopped.
        own_socket: a unix socket as well, without TLS and for this user alone.
        """
        self.make_app = make_app
        self.options: dict[str, Any] = {
            "bind": [address, *([f"unix:{own_socket}"] if own_socket else [])],
            "umask": 0o077,  # of its sockets and temporary files
            "workers": workers,
            "worker_class": type("OurWorker", (Worker,), {"refusal": staticmethod(refusal)}),
            "threads": threads,
            "timeout": 120,
            "graceful_timeout": grace_secs,
            "keepalive": 30,
            "proc_name": f"tei-appliance {name}",
            "control_socket_disable": True,
        }
        if tls:  # both files, too: gunicorn takes a server with a context alone for one without TLS
            certificate, key, context = tls
            ours = {"certfile": certificate, "keyfile": key, "ssl_context": lambda conf, default: context()}
            self.options |= ours
        super().__init__()

    def load_config(self) -> None:
        for key, value in self.options.items():
            if key in self.cfg.settings:
                self.cfg.set(key, value)

    def load(self) -> App:
        return patient(self.make_app())
