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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.core.problems import Kind, Problem

log = logging.getLogger(__name__)
MEDIA_TYPE = "text/event-stream"
TICK_SECS = 0.5
BEAT_SECS = 15.0  # a line that says nothing, so that proxies do not take the connection for dead
MOST_READERS = 100  # of one process
MOST_UNSENT = 1024 * 1024  # bytes that wait for a reader; one that is further behind is let go of
LONGEST_UNREAD_SECS = 30.0
RECONNECT_MS = 2000
FIRST = f"retry: {RECONNECT_MS}\n\n"
BEAT = ":\n\n"
LAST_CHUNK = b"0\r\n\r\n"

# What there is to send since the last time it was asked; empty for nothing. Raises: Problem, OSError, to end it.
Source = Callable[[], str]


def event(data: Any, word: str = "", number: int | None = None) -> str:
    """One event. word: what a browser's listeners are called by; without it all of them hear it."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {word}\n" if word else "")
    return f"{head}data: {json.dumps(data)}\n\n"


@dataclass
class Reader:
    """client: the socket, which nobody else uses any more. chunked: HTTP/1.1's frames. sent_at: of time.monotonic, when
    it last took all there was."""

    client: socket.socket
    chunked: bool
    source: Source
    unsent: bytearray = field(default_factory=bytearray)
    sent_at: float = field(default_factory=time.monotonic)
    said_at: float = field(default_factory=time.monotonic)
    is_watched: bool = False

    def fill(self, now: float) -> None:
        """Raises: Problem, OSError, when its source ends it."""
        text = self.source()
        if not text and now - self.said_at >= BEAT_SECS:
            text = BEAT
        if text:
            data = text.encode("utf-8", "replace")
            self.unsent += b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data
            self.said_at = now

    def send(self, now: float) -> bool:
        """Whether it is still there, and keeps up."""
        try:
            while self.unsent:
                del self.unsent[: self.client.send(self.unsent[:65536])]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return len(self.unsent) <= MOST_UNSENT and now - self.sent_at <= LONGEST_UNREAD_SECS
        except OSError:
            return False
        self.sent_at = now
        return True

    def is_gone(self) -> bool:
        """What a reader says is of no interest; its end is."""
        try:
            while self.client.recv(4096):
                pass
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            return True
        return True


class EventStreams:
    """Those of this process. One thread serves them, from the first one on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[int, Reader] = {}  # by the id of the socket
        self.started = False

    def __contains__(self, client: object) -> bool:
        with self.lock:
            return id(client) in self.kept

    def body(self, environ: Mapping[str, Any], source: Source) -> Iterator[bytes]:
        """The body of an answer that goes on. Raises: Problem where there are too many of them."""
        if len(self.kept) >= MOST_READERS:
            words = f"{MOST_READERS} streams of events are read already; ask for /events now and then instead"
            raise Problem(Kind.UNAVAILABLE, "TOO_MANY_STREAMS", words)
        return self.taken_over(environ, source)

    def taken_over(self, environ: Mapping[str, Any], source: Source) -> Iterator[bytes]:
        yield FIRST.encode()  # by gunicorn, behind the head
        client = environ.get("gunicorn.socket")
        if client is None:
            return  # another server has no connection to give away; its readers come back again and again
        client.setblocking(False)
        with self.lock:
            self.kept[id(client)] = Reader(client, environ["SERVER_PROTOCOL"] == "HTTP/1.1", source)
            if not self.started:  # only now: a thread does not survive gunicorn's fork
                self.started = True
                threading.Thread(target=self.serve, name="event-streams", daemon=True).start()
        # gunicorn leaves a connection alone that has ended under its hands, and says nothing of it.
        raise BrokenPipeError(errno.EPIPE, "the connection is served by the thread of event streams")

    def serve(self) -> None:
        watched = selectors.DefaultSelector()
        while True:
            gone = {key.data for key, _ in watched.select(TICK_SECS) if self.kept[key.data].is_gone()}
            with self.lock:
                kept = dict(self.kept)
            for number in kept.keys() - gone:
                if not (is_watched(watched, kept[number], number) and is_served(kept[number])):
                    gone.add(number)
            for number in gone:
                if kept[number].is_watched:
                    watched.unregister(kept[number].client)
                kept[number].client.close()
                with self.lock:
                    del self.kept[number]


def is_watched(watched: selectors.BaseSelector, reader: Reader, number: int) -> bool:
    """Whether its end will be heard of; False where it has ended before it was watched."""
    if not reader.is_watched:
        try:
            watched.register(reader.client, selectors.EVENT_READ, number)
        except (OSError, ValueError):
            return False
        reader.is_watched = True
    return True


def is_served(reader: Reader) -> bool:
    now = time.monotonic()
    try:
        reader.fill(now)
    except Problem as problem:
        log.debug("A stream of events ends: %s", problem.message)
        reader.unsent += LAST_CHUNK if reader.chunked else b""
        reader.send(now)
        return False
    except OSError as error:
        log.error("A stream of events ends: %s", error)
        return False
    return reader.send(now)


STREAMS = EventStreams()  # of this worker process
