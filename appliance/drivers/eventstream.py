"""Server-sent events for many readers without a thread for each.

gunicorn's worker writes the head of the answer and its first event; then the connection leaves it, and one thread of
the process writes to all of them. A reader is asked for nothing more than to read: who does not, or has gone, is let go
of, and comes back with the number of the last event (`Last-Event-ID`), as browsers do by themselves.
"""

from __future__ import annotations

import errno
import json
import logging
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.core.problems import Kind, Problem

log = logging.getLogger(__name__)
MEDIA_TYPE = "text/event-stream"
TICK_SECS = 0.5
BEAT_SECS = 15.0  # a line that says nothing, so that proxies do not take the connection for dead
MOST_READERS = 100  # of one process
MOST_AT_ONCE = 256 * 1024  # bytes that a source says at once; it is asked again when they are sent
TURNS = 8  # that a reader who keeps up has in a row
LONGEST_UNREAD_SECS = 30.0
RECONNECT_MS = 2000
FIRST = f"retry: {RECONNECT_MS}\n\n"
BEAT = ":\n\n"
LAST_CHUNK = b"0\r\n\r\n"

# What there is to send since the last time it was asked, some MOST_AT_ONCE of it; empty for nothing. Raises: Problem,
# OSError, to end the stream.
Source = Callable[[], str]


def event(data: Any, word: str = "", number: int | None = None) -> str:
    """One event. word: what a browser's listeners are called by; without it all of them hear it."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {word}\n" if word else "")
    return f"{head}data: {json.dumps(data)}\n\n"


@dataclass
class Reader:
    """client: the socket, which nobody else uses any more. chunked: HTTP/1.1's frames. said_at: of time.monotonic, when
    there was last something to say; sent_at: when it last took something, or nothing waited for it."""

    client: socket.socket
    chunked: bool
    source: Source
    unsent: bytearray = field(default_factory=bytearray)
    sent_at: float = field(default_factory=time.monotonic)
    said_at: float = field(default_factory=time.monotonic)
    is_watched: bool = False

    def serve(self, now: float) -> bool:
        """Send what there is, as far as it is taken. Whether it is still there, and keeps up. Raises: Problem, OSError,
        when its source ends it."""
        for _ in range(TURNS):
            if not self.unsent:
                self.fill(now)
            if not self.unsent:
                break
            if not self.send(now):
                return False
            if self.unsent:
                break
        return now - self.sent_at <= LONGEST_UNREAD_SECS

    def fill(self, now: float) -> None:
        text = self.source()
        if not text and now - self.said_at >= BEAT_SECS:
            text = BEAT
        if text:
            data = text.encode("utf-8", "replace")
            self.unsent += b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data
            self.said_at = now
        self.sent_at = now

    def send(self, now: float) -> bool:
        """Whether it is still there."""
        try:
            while self.unsent:
                del self.unsent[: self.client.send(self.unsent[:65536])]
                self.sent_at = now
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return True

    def end(self, now: float) -> None:
        """A last chunk, so that it is no broken answer."""
        self.unsent += LAST_CHUNK if self.chunked else b""
        self.send(now)

    def is_gone(self) -> bool:
        """Whether its end has come; who says anything more has taken this for something else."""
        try:
            self.client.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            pass
        return True


class PendingReader:
    """One who is about to be told that he reads, and whose connection gunicorn still has."""


class EventStreams:
    """Those of this process. One thread serves them, from the first one on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: weakref.WeakSet[PendingReader] = weakref.WeakSet()  # each is kept by its answer's body alone
        self.kept: dict[int, Reader] = {}  # by the id of the socket
        self.taken: set[int] = set()  # ids of sockets that gunicorn still holds
        self.thread: threading.Thread | None = None

    def has_taken(self, client: object) -> bool:
        """Whether this connection is ours now, or was and has ended. For gunicorn, which asks once of each."""
        with self.lock:
            known = id(client) in self.taken
            self.taken.discard(id(client))
            return known

    def body(self, environ: Mapping[str, Any], source: Source) -> Iterator[bytes]:
        """The body of an answer that goes on. Raises: Problem where there are too many of them."""
        with self.lock:
            if len(self.kept) + len(self.pending) >= MOST_READERS:
                words = f"{MOST_READERS} streams of events are read already; ask for /events now and then instead"
                raise Problem(Kind.UNAVAILABLE, "TOO_MANY_STREAMS", words)
            self.pending.add(pending := PendingReader())
        return self.taken_over(environ, source, pending)

    def taken_over(self, environ: Mapping[str, Any], source: Source, pending: PendingReader) -> Iterator[bytes]:
        yield FIRST.encode()  # by gunicorn, behind the head
        client = environ.get("gunicorn.socket")
        if client is None:
            return  # another server has no connection to give away; its readers come back again and again
        self.take(client, environ["SERVER_PROTOCOL"] == "HTTP/1.1", source, pending)
        # gunicorn leaves a connection alone that has ended under its hands, and says nothing of it.
        raise BrokenPipeError(errno.EPIPE, "the connection is served by the thread of event streams")

    def take(self, client: socket.socket, chunked: bool, source: Source, pending: PendingReader) -> None:
        with self.lock:
            self.pending.discard(pending)
            client.setblocking(False)
            self.kept[id(client)] = Reader(client, chunked, source)
            self.taken.add(id(client))
            if self.thread is None or not self.thread.is_alive():  # only now: a thread does not survive gunicorn's fork
                self.thread = threading.Thread(target=self.run, name="event-streams", daemon=True)
                self.thread.start()

    def run(self) -> None:
        watched = selectors.DefaultSelector()
        try:
            self.serve(watched)
        finally:  # a fault of ours: who reads comes back, and finds another thread
            watched.close()
            with self.lock:
                for reader in self.kept.values():
                    reader.client.close()
                self.kept.clear()

    def serve(self, watched: selectors.BaseSelector) -> None:
        """Sources are asked once in a tick, whatever comes from readers meanwhile."""
        next_at = 0.0
        while True:
            until = next_at - time.monotonic()
            gone = {key.data for key, _ in watched.select(max(0.0, until)) if self.kept[key.data].is_gone()}
            with self.lock:
                kept = dict(self.kept)
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + TICK_SECS
                gone |= {number for number in kept.keys() - gone if not is_served(watched, kept[number], number)}
            for number in gone:
                self.let_go(watched, number)

    def let_go(self, watched: selectors.BaseSelector, number: int) -> None:
        with self.lock:
            reader = self.kept.pop(number)
        if reader.is_watched:
            watched.unregister(reader.client)
        reader.client.close()


def is_served(watched: selectors.BaseSelector, reader: Reader, number: int) -> bool:
    """Whether it goes on. number: of the reader, by which its end will be heard of."""
    now = time.monotonic()
    try:
        if not reader.is_watched:
            watched.register(reader.client, selectors.EVENT_READ, number)
            reader.is_watched = True
        return reader.serve(now)
    except Problem as problem:
        log.debug("A stream of events ends: %s", problem.message)
        reader.end(now)
    except (OSError, ValueError) as error:  # ValueError: of a socket that has ended before it was watched
        log.error("A stream of events ends: %s", error)
    return False


STREAMS = EventStreams()  # of this worker process
