"""HTTP clients that go away while their batch is computed. WSGI does not tell, so one thread looks at their sockets.

What shows that a client is gone. It is looked for below TLS, where the client's last bytes may lie unread:

    the socket has an error, or is closed both ways      gone: it was reset, or our probe below was refused
    the client has ended its side (FIN)                  gone, or it sends nothing more and waits: send a probe
    anything else                                        it is there

Looking alone cannot decide the second case: a client that called close() and one that called shutdown(SHUT_WR) have
sent the same, and the kernel of either acknowledges keep-alive probes for a minute (Linux 6.18, tcp_fin_timeout).
Only data is refused with a reset once no process holds the connection any more. So one byte of TCP's urgent data is
sent: it stands outside the stream, and a receiver that has not asked for it (SO_OOBINLINE) drops it. A line of HTTP
(100, 102) would be refused as well, but HTTP/1.0 has none, and a client that has ended its side may take the first line
for its answer. A client that has not ended its side gets no byte; and no client library ends its side while it still
wants an answer.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from appliance.gateway.refusals import Reason, Refusal

log = logging.getLogger(__name__)
POLL_SECS = 0.25
PROBE_SECS = 2.0  # between two probes of a client that has ended its side
BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL


T = TypeVar("T")


@dataclass
class WatchedClient:
    client: socket.socket
    cancel: Callable[[], object]
    probe_at: float = 0.0  # by the monotonic clock


class ClientWatch:
    """The sockets of requests in work, and what to call when a client is gone."""

    def __init__(self) -> None:
        self.watched: dict[int, WatchedClient] = {}
        self.lock = threading.Lock()
        self.started = False

    @contextmanager
    def cancelling_when_gone(self, client: socket.socket | None, cancel: Callable[[], object]) -> Iterator[None]:
        """A block during which ``cancel`` is called, once, when the client is gone."""
        if client is None:
            yield
            return
        with self.lock:
            self.watched[id(client)] = WatchedClient(client, cancel)
            if not self.started:  # not earlier: a thread does not survive gunicorn's fork
                self.started = True
                threading.Thread(target=self.watch, name="client-watch", daemon=True).start()
        try:
            yield
        finally:
            with self.lock:
                self.watched.pop(id(client), None)

    def watch(self) -> None:
        while True:
            time.sleep(POLL_SECS)
            for watched in self.pop_gone(time.monotonic()):
                try:
                    watched.cancel()
                except Exception:
                    log.exception("What a client left behind could not be cancelled")

    def pop_gone(self, now: float) -> list[WatchedClient]:
        """The clients that are gone, which are watched no longer.

        They are looked at under the lock: else the request may end meanwhile, and its file descriptor be that of
        another connection.
        """
        with self.lock:
            keys = [key for key, watched in self.watched.items() if is_gone(watched, now)]
            return [self.watched.pop(key) for key in keys]


def while_there(client: socket.socket | None, parts: Iterable[T]) -> Iterator[T]:
    """The parts of a request that are answered one after the other, as long as its client waits. Raises: Refusal."""
    watched = WatchedClient(client, lambda: None) if client else None
    for part in parts:
        if watched and is_gone(watched, time.monotonic()):
            raise Refusal(Reason.UNAVAILABLE, "The client is gone")
        yield part


def is_gone(watched: WatchedClient, now: float) -> bool:
    """The table above. A socket that cannot be looked at counts as there, and does not end the watch over others."""
    try:
        events = look(watched.client)
        if events & BROKEN:
            return True
        if events & select.POLLRDHUP and watched.probe_at <= now:
            watched.probe_at = now + PROBE_SECS
            # Not the method of an SSLSocket, which knows no flags.
            socket.socket.send(watched.client, b"\n", socket.MSG_OOB | socket.MSG_DONTWAIT)
            return bool(look(watched.client) & BROKEN)  # on the same machine the answer is there already
    except BlockingIOError:
        return False  # the send buffer is full, though not with our probes: the next one may tell
    except OSError:
        return True
    except Exception:
        log.exception("A client's socket cannot be looked at")
    return False


def look(client: socket.socket) -> int:
    """The state of the connection, as poll(2) has it; a closed one shows an error."""
    poll = select.poll()
    poll.register(client.fileno(), select.POLLRDHUP)
    return next((events for _, events in poll.poll(0)), 0)
