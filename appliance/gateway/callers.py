"""HTTP clients that go away while their batch is computed: WSGI does not tell, so one thread looks at their sockets.

What shows that a client is gone, looked for below TLS, where its own last words may lie unread:

    the socket has an error, or is closed both ways      gone: it was reset, or our probe below was refused
    the client has ended its side (FIN)                  gone, or it only has nothing more to say and waits: ask
    anything else                                        it is there

Looking alone cannot tell the second case: a client that called close() and one that called shutdown(SHUT_WR) have
sent the same, and the kernel of either acknowledges keep-alive probes for a minute (Linux 6.18, tcp_fin_timeout).
Only data is refused with a reset where nobody holds the connection any more. So one byte of TCP's urgent data is sent:
it stands outside the stream, and is dropped by whoever has not asked for it (SO_OOBINLINE). A line of HTTP (100, 102)
would be refused as well, but HTTP/1.0 has none, and who ends his side may take the first line for his answer. Who has
not ended his side gets no byte, and no client library does so that still wants its answer.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)
POLL_SECS = 0.25
PROBE_SECS = 2.0  # between two probes of a client that has ended its side
BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL


@dataclass
class Watched:
    client: socket.socket
    cancel: Callable[[], object]
    probe_at: float = 0.0  # by the monotonic clock


class Callers:
    """Sockets of requests in work, and what to call when one is found left by its client."""

    def __init__(self) -> None:
        self.watched: dict[int, Watched] = {}
        self.lock = threading.Lock()
        self.started = False

    @contextmanager
    def leaving(self, client: socket.socket | None, cancel: Callable[[], object]) -> Iterator[None]:
        """While in the block: call ``cancel`` once when the client is gone."""
        if client is None:
            yield
            return
        with self.lock:
            self.watched[id(client)] = Watched(client, cancel)
            if not self.started:  # not earlier: a thread does not survive gunicorn's fork
                self.started = True
                threading.Thread(target=self.watch, name="callers", daemon=True).start()
        try:
            yield
        finally:
            with self.lock:
                self.watched.pop(id(client), None)

    def watch(self) -> None:
        while True:
            time.sleep(POLL_SECS)
            for left in self.take_left(time.monotonic()):
                try:
                    left.cancel()
                except Exception:
                    log.exception("What a client left behind could not be cancelled")

    def take_left(self, now: float) -> list[Watched]:
        """Those whose client is gone, watched no longer.

        Looked at under the lock: else the request may end meanwhile, and its number be another connection's.
        """
        with self.lock:
            found = [key for key, watched in self.watched.items() if gone(watched, now)]
            return [self.watched.pop(key) for key in found]


def gone(watched: Watched, now: float) -> bool:
    """The table above. What fails for one socket says nothing of it, and must not end the watch over the others."""
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
        return False  # its buffer is full: of nothing that we sent, so it comes again
    except OSError:
        return True
    except Exception:
        log.exception("A client's socket cannot be looked at")
    return False


def look(client: socket.socket) -> int:
    """The state of the connection as poll(2) has it; that of a closed one is an error."""
    poll = select.poll()
    poll.register(client.fileno(), select.POLLRDHUP)
    return next((events for _, events in poll.poll(0)), 0)
