"""Connections that have had their last answer, and that their clients shall end."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LINGER_SECS = 2.0  # that a client may take to end its connection
UNREAD_BYTES = 65536  # of a request that nobody read: closed with unread bytes, a connection loses its answer
READ_BYTES = 4096


class Ending(NamedTuple):
    """until: by time.monotonic."""

    client: socket.socket
    until: float
    ended: Callable[[], object]


class EndingConnections:
    """Lets clients end their connections, and waits for none of them.

    gunicorn (27.0) waits in its main thread, 2 s for each: ten clients kept all others waiting for 14 s.
    """

    def __init__(self, poller: selectors.BaseSelector) -> None:
        """poller: calls the function that is registered with a socket, with the socket, when that can be read."""
        self.poller = poller
        self.endings: deque[Ending] = deque()  # the oldest first

    def add(self, client: socket.socket, ended: Callable[[], object]) -> None:
        """Send no more on it. ended: is called once it is closed."""
        try:
            client.shutdown(socket.SHUT_WR)
        except OSError:  # it is closed
            client.close()
            ended()
            return
        client.setblocking(False)
        ending = Ending(client, time.monotonic() + LINGER_SECS, ended)
        unread = UNREAD_BYTES

        def drain(client: socket.socket) -> None:
            nonlocal unread
            try:
                data = client.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            unread -= len(data)
            if not data or unread <= 0:
                self.endings.remove(ending)
                self.close(ending)

        self.endings.append(ending)
        self.poller.register(client, selectors.EVENT_READ, drain)

    def expire(self) -> None:
        """Close those whose clients have taken too long."""
        while self.endings and self.endings[0].until <= time.monotonic():
            self.close(self.endings.popleft())

    def close(self, ending: Ending) -> None:
        self.poller.unregister(ending.client)
        ending.client.close()
        ending.ended()
