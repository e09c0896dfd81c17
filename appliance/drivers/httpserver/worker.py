"""gunicorn's thread workers, with our refusals and with time limits for clients.

Workers have equally many connections, and a thread stays with a client that asks again at once. Whoever says nothing,
or only a part of a request (`files/requestbuffer.py`), holds neither a thread nor the main thread. While all threads
have work, others answer those who ask how the program is: it is not dead because it has much to do.

gunicorn's sockets have no timeout (27.0). Here a client that sends or reads too slowly loses its connection.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import socket
import ssl
import threading
import time
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from gunicorn.http import errors as http
from gunicorn.http import get_parser
from gunicorn.sock import ssl_wrap_socket
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, ThreadWorker

from appliance.core.connection_counts import ConnectionCounts
from appliance.files.endings import EndingConnections
from appliance.files.heartbeat import Heartbeat
from appliance.files.requestbuffer import has_read_ahead, take_request
from appliance.files.transferlimits import GRACE_SECS, LIMITS
from appliance.wire.http1 import last_answer, path_of

STATUS = (
    (http.LimitRequestLine, 414),
    (http.LimitRequestHeaders, 431),
    (http.UnsupportedTransferCoding, 501),
)
EXPLAINED = (http.LimitRequestLine, http.LimitRequestHeaders)
HANDSHAKE_SECS = 5.0  # from one part of it to the next; GRACE_SECS for all
SILENT_SECS = 1.0  # each connection may be as long as that, also where all have their place
PROBE_THREADS = 4
TICK_SECS = 0.25
# Of an answer that the kernel takes before its client does. By itself it takes up to 4 MB, and then nothing before a
# third of that is gone: a client that reads as fast as it must was cut off while it read.
UNSENT_BYTES = 128 * 1024
YIELD_SECS = 0.001  # for a worker with fewer connections to take the next one
NEXT_SECS = 0.05  # how long a thread waits for its client's next request
STAY_SECS = 1.0  # how long it does so for one client; then another may have a thread of its own

# (status, what is wrong) -> (content type, body): a program's answer to bytes that are no HTTP request.
Refusal = Callable[[int, str], tuple[str, str]]
HasTaken = Callable[[socket.socket], bool]
Work = Callable[[Any], Any]  # of a connection


class GunicornWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's gthread with a time limit for requests, and threads that stay with busy clients.

    refusal: answers bytes that are no HTTP. has_taken: whether a connection is somebody else's, once it was answered.
    connection_counts, slot: of all workers, and this one's place there. heartbeat, probes: as of `GunicornServer`.
    """

    refusal: Refusal
    has_taken: HasTaken
    connection_counts: ConnectionCounts
    slot: int
    heartbeat: Path | None
    probes: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_wait = threading.Semaphore(self.cfg.threads // 2)

    def run(self) -> None:
        for listener in self.sockets:
            if listener.family != socket.AF_UNIX:  # its connections have it from here
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.endings = EndingConnections(self.poller)
        self.tasks = self.probe_tasks = 0  # of the main thread: in the pools, at work or waiting for a thread
        self.looking = ThreadPoolExecutor(1)
        self.probing = ThreadPoolExecutor(PROBE_THREADS)
        self.heart = Heartbeat(self.heartbeat, os.getppid()) if self.heartbeat else None
        super().run()

    def is_parent_alive(self) -> bool:
        """A worker without a master leaves the port at once to the next one, and ends as when it is told to."""
        if super().is_parent_alive():
            return True
        self.alive = False
        self.set_accept_enabled(False)
        return False

    def set_accept_enabled(self, enabled: bool) -> None:
        super().set_accept_enabled(enabled)
        if not (enabled or self.alive):
            self.leave_port()

    def leave_port(self) -> None:
        """Who has connected is served; who comes from now on is refused at once, and not when the worker has ended."""
        for listener in self.sockets:
            before = -1
            with suppress(OSError):  # no file descriptor is left
                while before < self.nr_conns < self.worker_connections:
                    before = self.nr_conns
                    super().accept(listener)
            listener.close()

    def notify(self) -> None:
        """Each time that it has done something, or a second has passed."""
        super().notify()
        self.make_room()
        if self.heart:
            self.heart.beat()
        if self.alive:
            self.connection_counts.set(self.slot, self.nr_conns)
        else:
            self.connection_counts.leave(self.slot)

    def make_room(self) -> None:
        """So that there is soon room for another connection: end those that have been silent longest."""
        silent = ((GRACE_SECS, self.pending_conns), (self.cfg.keepalive, self.keepalived_conns))
        while self.nr_conns >= self.worker_connections:
            since = [(conns[0].timeout - allowed, conns) for allowed, conns in silent if conns]
            at, conns = min(since, key=itemgetter(0), default=(time.monotonic(), None))
            if conns is None or time.monotonic() - at < SILENT_SECS:
                return
            conn = conns.popleft()
            self.poller.unregister(conn.sock)
            self.forget()
            conn.close()

    def accept(self, listener: Any) -> None:
        until = time.monotonic() + YIELD_SECS
        while self.connection_counts.has_more(self.slot) and time.monotonic() < until:
            time.sleep(YIELD_SECS / 5)
        try:
            super().accept(listener)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.log.error("No file descriptor is left for another connection; it waits until one ends")
            time.sleep(TICK_SECS)

    def enqueue_req(self, conn: Any) -> None:
        """A connection through a unix socket has no TLS, which could require a certificate."""
        if conn.parser is None and conn.sock.family == socket.AF_UNIX:
            # gunicorn (27.0) wraps only connections without a parser in TLS.
            conn.parser = get_parser(conn.cfg, conn.sock, conn.client)
        self.enqueue(conn)

    def enqueue(self, conn: Any) -> None:
        """Let a new connection wait for its first bytes without a thread.

        gunicorn itself gives it a thread for 5 s and then waits 30 s more: 32 silent clients blocked control for all
        others.
        """
        if not (conn.initialized or conn.data_ready):
            self.wait_for_bytes(conn)
        elif self.tasks < self.cfg.threads:
            self.serve(conn)
        else:
            self.begin(self.looking, self.look_at, conn, self.finish_look)

    def begin(self, pool: Executor, work: Work, conn: Any, finish: Callable[[Any, Future[Any]], None]) -> None:
        """finish: by the main thread, with the future."""
        pool.submit(work, conn).add_done_callback(lambda done: self.method_queue.defer(finish, conn, done))

    def serve(self, conn: Any) -> None:
        self.tasks += 1
        self.begin(self.tpool, self.handle, conn, self.finish_task)

    def finish_task(self, conn: Any, done: Future[Any]) -> None:
        self.tasks -= 1
        self.finish_request(conn, done)

    def look_at(self, conn: Any) -> Any:
        """What its client wants, where all of that has come."""
        there = self.has_request(conn)
        return path_of(conn.parser.unreader.buf.getvalue()) if there else there

    def finish_look(self, conn: Any, done: Future[Any]) -> None:
        path = None if done.exception() else done.result()
        if isinstance(path, str) and path.endswith(self.probes) and self.probe_tasks < PROBE_THREADS:
            self.probe_tasks += 1
            self.begin(self.probing, self.handle_one, conn, self.finish_probe)
        elif isinstance(path, str):
            self.serve(conn)
        else:
            self.finish_request(conn, done)

    def finish_probe(self, conn: Any, done: Future[Any]) -> None:
        self.probe_tasks -= 1
        self.finish_request(conn, done)

    def wait_for_bytes(self, conn: Any) -> None:
        """Without a thread. left: of its time for a request and for agreeing on TLS; no wait for a thread is in it."""
        conn.left = GRACE_SECS if getattr(conn, "left", None) is None else conn.left
        conn.timeout = time.monotonic() + conn.left
        if conn.left <= 0:
            self.endings.add(conn.sock, self.forget)
            return
        conn.sock.setblocking(False)
        insort(self.pending_conns, conn, key=attrgetter("timeout"))  # the oldest is asked for first
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def on_pending_socket_readable(self, conn: Any, client: Any) -> None:
        conn.left = conn.timeout - time.monotonic()
        super().on_pending_socket_readable(conn, client)

    def handle(self, conn: Any) -> Any:
        """Serve a request of the connection, and those that its client sends soon after each answer.

        gunicorn gives the connection back to its main thread each time, and that to a thread when a request comes: a
        tenth of what an embedding cost the gateway. Half of the threads never wait for a client.
        """
        goes_on = self.handle_one(conn)
        if goes_on is not True or not self.may_wait.acquire(blocking=False):
            return goes_on
        try:
            until = time.monotonic() + STAY_SECS
            while goes_on is True and time.monotonic() < until and self.comes_soon(conn):
                goes_on = self.handle_one(conn)
            return goes_on
        finally:
            self.may_wait.release()

    def comes_soon(self, conn: Any) -> bool:
        """Whether the next request, or the end of the connection, is there within a moment."""
        if has_read_ahead(conn.sock, conn.parser.unreader.buf):
            return True
        waiting = select.poll()
        waiting.register(conn.sock, select.POLLIN)
        return bool(waiting.poll(NEXT_SECS * 1000))

    def handle_one(self, conn: Any) -> Any:
        """Serve one request. True: the connection is kept for the next one. None: its client has not sent all of it."""
        if not (there := self.has_request(conn)):
            return there
        conn.left, conn.data_ready = None, True
        conn.head = LIMITS.begin(lambda: conn.sock)
        try:
            return super().handle(conn)
        finally:
            LIMITS.end(conn.head)

    def has_request(self, conn: Any) -> bool | None:
        """Whether its client has sent a request. None: more of it has to come. False: TLS could not be agreed on."""
        if conn.parser is None:
            if self.cfg.is_ssl and not (agreed := self.agree(conn)):
                return agreed
            conn.parser = get_parser(conn.cfg, conn.sock, conn.client)
        return take_request(conn.sock, conn.parser.unreader.buf) or None

    def agree(self, conn: Any) -> bool | None:
        """The handshake of TLS, as far as its client has come. None: more of it has to come. False: it has failed."""
        try:
            conn.sock.setblocking(False)
            if not isinstance(conn.sock, ssl.SSLSocket):
                conn.sock = ssl_wrap_socket(conn.sock, conn.cfg)
            conn.sock.do_handshake()
            return True
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            conn.left = min(conn.left, HANDSHAKE_SECS)
            return None
        except ssl.SSLEOFError:
            conn.sock.close()
        except ssl.SSLError as error:
            self.handle_error(None, conn.sock, conn.client, error)
        except OSError as error:
            self.log.debug("The client was gone before TLS was agreed on: %s", error)
        return False

    def handle_request(self, req: Any, conn: Any) -> Any:
        LIMITS.end(conn.head)
        return super().handle_request(req, conn)

    def finish_request(self, conn: Any, fs: Future[Any]) -> None:
        """A connection that has become a stream of events is nobody's here any more."""
        if self.has_taken(conn.sock):
            self.forget()
            return
        if error := fs.exception():
            self.log.error("A connection ends because of %r", error, exc_info=error)
        goes_on = not error and fs.result()
        if goes_on and has_read_ahead(conn.sock, conn.parser.unreader.buf):
            self.enqueue(conn)
        elif goes_on:
            super().finish_request(conn, fs)
        elif goes_on is None:
            self.wait_for_bytes(conn)
        else:
            self.endings.add(conn.sock, self.forget)

    def forget(self) -> None:
        self.nr_conns -= 1

    def murder_pending(self) -> None:
        """Also those that have had their last answer. A worker that stops waits for first requests as for next ones."""
        if not self.alive:
            latest = time.monotonic() + STOP_KEEPALIVE_LINGER
            for conn in self.pending_conns:
                conn.timeout = min(conn.timeout, latest)
        super().murder_pending()
        self.endings.expire()

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        status = next((status for kind, status in STATUS if isinstance(exc, kind)), 400)
        # Other errors repeat what the client sent, which may be a key.
        message = f"The request cannot be read: {type(exc).__name__}{f' {exc}' if isinstance(exc, EXPLAINED) else ''}"
        if isinstance(exc, ssl.SSLError):
            status, message = 403, str(exc.args[-1])
        try:
            client.sendall(last_answer(status, *self.refusal(status, message)))
        except OSError:
            self.log.debug("The client was gone before it could be told: %s", exc)
