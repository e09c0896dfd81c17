"""HTTP clients that go away while their batch is computed: WSGI does not tell, so one thread looks at their sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_SECS = 0.25


class Callers:
    """Sockets of requests in work, and what to call when one is found closed by its client."""

    def __init__(self) -> None:
        self.watched: dict[int, tuple[socket.socket, Callable[[], object]]] = {}
        self.lock = threading.Lock()
        self.started = False

    @contextmanager
    def leaving(self, client: socket.socket | None, cancel: Callable[[], object]) -> Iterator[None]:
        """While in the block: call ``cancel`` once when the client is gone."""
        if client is None:
            yield
            return
        with self.lock:
            self.watched[id(client)] = (client, cancel)
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
            with self.lock:
                watched = list(self.watched.items())
            for key, (client, cancel) in watched:
                if gone(client):
                    with self.lock:
                        self.watched.pop(key, None)
                    cancel()


def gone(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
