"""Whether processes accept HTTP/2: a connection to each is kept, and it is told when it is accepted and when it ends.

The end of a process ends its connection, and the kernel tells of that at once; what does not accept is tried again. No
call is made on these connections, so they cost nothing while nothing happens. Each watched channel of grpcio has a
thread that asks for its state five times a second (1.85): 100 idle replicas took 0.05 of a core.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import time
from collections.abc import Callable
from queue import SimpleQueue

from appliance.wire.http2 import ClientConnection

RETRY_SECS = 0.2  # some 30 us of CPU for each replica that does not listen yet
READ_BYTES = 65536

Tell = Callable[[bool], None]


class Line:
    """The connection to one address, if there is one. Touched by the thread of `run` alone, except for ``ended``.

    tell(accepted) is called at each change. protocol: None while the socket connects.
    """

    def __init__(self, address: str, tell: Tell) -> None:
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        self.tell = tell
        self.socket: socket.socket | None = None
        self.protocol: ClientConnection | None = None
        self.accepted = False
        self.retry_at = 0.0  # by time.monotonic
        self.ended = False


class Reachability:
    """Watches any number of addresses, as long as one thread calls `run` again and again. `watch` is thread-safe."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.changes = SimpleQueue[Line]()  # lines that begin or have ended
        self.unconnected: set[Line] = set()

    def watch(self, address: str, tell: Tell) -> Callable[[], None]:
        """Watch ``host:port`` until the returned function is called. At first nothing is accepted."""
        line = Line(address, tell)
        self.changes.put(line)

        def end() -> None:
            line.ended = True
            self.changes.put(line)

        return end

    def run(self, secs: float) -> None:
        """Watch for so long, and tell of each change in this thread. Raises: what is raised by those who are told; then
        nothing of the others is lost, if `run` is called again."""
        until = time.monotonic() + secs
        while not self.changes.empty():
            self.adopt(self.changes.get())
        while (now := time.monotonic()) < until:
            for line in [line for line in self.unconnected if line.retry_at <= now]:
                self.connect(line)
            retry_at = min((line.retry_at for line in self.unconnected), default=math.inf)
            for key, _ in self.selector.select(max(0.0, min(until, retry_at) - time.monotonic())):
                self.proceed(key.data)

    def adopt(self, line: Line) -> None:
        if line.ended:
            self.close(line)
            self.unconnected.discard(line)
        else:
            self.unconnected.add(line)

    def connect(self, line: Line) -> None:
        """Begin to connect. It may be refused at once, or later."""
        try:
            line.socket = socket.socket()
            line.socket.setblocking(False)
            if (error := line.socket.connect_ex(line.address)) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            self.selector.register(line.socket, selectors.EVENT_WRITE, line)
            self.unconnected.discard(line)
        except OSError:
            self.lose(line)

    def proceed(self, line: Line) -> None:
        """What a line waited for has come: it is connected or refused, or there is something to read."""
        assert line.socket
        try:
            if line.protocol is None:
                if error := line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                line.protocol = ClientConnection()
                self.selector.modify(line.socket, selectors.EVENT_READ, line)
            else:
                receive(line.socket, line.protocol)
            reply = line.protocol.data_to_send()
            if line.socket.send(reply) < len(reply):
                raise ConnectionAbortedError("it does not read what is sent")
        except OSError:
            self.lose(line)
            return
        if line.protocol.greeted and not line.accepted:
            self.become(line, True)

    def lose(self, line: Line) -> None:
        self.close(line)
        line.retry_at = time.monotonic() + RETRY_SECS
        self.unconnected.add(line)
        if line.accepted:
            self.become(line, False)

    def close(self, line: Line) -> None:
        if line.socket and line not in self.unconnected:
            self.selector.unregister(line.socket)
        if line.socket:
            line.socket.close()
        line.socket = line.protocol = None

    def become(self, line: Line, accepted: bool) -> None:
        line.accepted = accepted
        if not line.ended:
            line.tell(accepted)


def receive(connection: socket.socket, protocol: ClientConnection) -> None:
    """Read what is there. Raises: OSError when the peer has ended the connection, is about to, or speaks no HTTP/2."""
    data = connection.recv(READ_BYTES)
    if not data:
        raise ConnectionResetError("it was closed")
    protocol.receive(data)
    if protocol.going_away or protocol.violated:
        raise ConnectionResetError("it takes no calls")
