"""Whether processes accept HTTP/2: a connection to each is kept, and it is told when it is accepted and when it ends.

The end of a process ends its connection, and the kernel tells of that at once; what does not accept is tried again. No
call is made on these connections, so they cost nothing while nothing happens. Each watched channel of grpcio has a
thread that asks for its state five times a second (1.85): 100 idle replicas took 0.05 of a core.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from appliance.core.addresses import address
from appliance.files.securesocket import Secure, SecureSocket
from appliance.files.sockets import notice_loss, split
from appliance.wire.http2 import ClientConnection

log = logging.getLogger(__name__)
CONNECT_SECS = 1.0  # the kernel asks again after 1, 3, 7, 15 s: a machine that is back would wait for the next time
RETRY_SECS = 0.2  # some 30 us of CPU for each replica that does not listen yet
READ_BYTES = 65536

Tell = Callable[[bool], None]


class Line:
    """The connection to one address, if there is one. Touched by the thread of `run` alone, except for ``ended``.

    tell(accepted) is called at each change. secure: as for `Connection`. protocol: None while the socket connects.
    unsent: what the socket has not taken yet, because the handshake of TLS goes on.
    """

    def __init__(self, address: str, tell: Tell, secure: Secure | None) -> None:
        self.address = split(address)
        self.family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        self.tell = tell
        self.secure = secure
        self.socket: socket.socket | SecureSocket | None = None
        self.protocol: ClientConnection | None = None
        self.unsent = bytearray()
        self.accepted = False
        self.retry_at = 0.0  # by time.monotonic
        self.ended = False
        self.said = ""

    def say(self, error: ssl.SSLError) -> None:
        """Why there is no TLS, once as long as it is the same: else nobody learns more than that nothing is there."""
        words = error.strerror or str(error)
        if words != self.said:
            log.warning("No connection with TLS to %s: %s", address(*self.address), words)
        self.said = words


class Notice(Protocol):
    """Something else that is heard of in the same thread."""

    def fileno(self) -> int:
        """To be waited for."""

    def heard(self) -> bool:
        """Whether it is worth coming back for."""


class Reachability:
    """Watches any number of addresses, as long as one thread calls `run` again and again. `watch` is thread-safe.

    notice: `run` comes back at once when it was heard.
    """

    def __init__(self, notice: Notice | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        if notice:
            self.selector.register(notice, selectors.EVENT_READ, notice)
        self.changes = SimpleQueue[Line]()  # lines that begin or have ended
        self.unconnected: set[Line] = set()
        self.connecting: set[Line] = set()

    def watch(self, address: str, tell: Tell, secure: Secure | None = None) -> Callable[[], None]:
        """Watch ``IP:port`` until the returned function is called. At first nothing is accepted."""
        line = Line(address, tell, secure)
        self.changes.put(line)

        def end() -> None:
            line.ended = True
            self.changes.put(line)

        return end

    def run(self, secs: float) -> None:
        """Watch for so long, or until the notice is heard, and tell of each change in this thread. Raises: what is
        raised by those who are told; then nothing of the others is lost, if `run` is called again."""
        until = time.monotonic() + secs
        while not self.changes.empty():
            self.adopt(self.changes.get())
        while (now := time.monotonic()) < until:
            for line in [line for line in self.connecting if line.retry_at <= now]:
                self.lose(line)
            for line in [line for line in self.unconnected if line.retry_at <= now]:
                self.connect(line)
            retry_at = min((line.retry_at for line in (*self.unconnected, *self.connecting)), default=math.inf)
            for key, _ in self.selector.select(max(0.0, min(until, retry_at) - time.monotonic())):
                if isinstance(key.data, Line):
                    self.proceed(key.data)
                elif key.data.heard():
                    until = now

    def adopt(self, line: Line) -> None:
        if line.ended:
            self.close(line)
            self.unconnected.discard(line)
        else:
            self.unconnected.add(line)

    def connect(self, line: Line) -> None:
        """Begin to connect. It may be refused at once, or later."""
        try:
            line.socket = plain = socket.socket(line.family)
            plain.setblocking(False)
            if (error := plain.connect_ex(line.address)) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            self.selector.register(plain, selectors.EVENT_WRITE, line)
            self.unconnected.discard(line)
            self.connecting.add(line)
            line.retry_at = time.monotonic() + CONNECT_SECS
        except OSError:
            self.lose(line)

    def proceed(self, line: Line) -> None:
        """What a line waited for has come: it is connected or refused, or there is something to read."""
        try:
            if line.protocol is None:
                self.begin(line)
            else:
                receive(line)
            send(line)
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                line.say(error)
            self.lose(line)
            return
        if line.protocol and line.protocol.greeted and not line.accepted:
            self.become(line, True)

    def begin(self, line: Line) -> None:
        """Raises: OSError when the connection is refused."""
        assert isinstance(line.socket, socket.socket)
        self.connecting.discard(line)
        if error := line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        notice_loss(line.socket)
        self.selector.modify(line.socket, selectors.EVENT_READ, line)
        line.protocol = ClientConnection()
        if line.secure:
            line.socket = line.secure(line.socket)

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
        self.connecting.discard(line)
        line.socket = line.protocol = None
        line.unsent.clear()

    def become(self, line: Line, accepted: bool) -> None:
        line.accepted, line.said = accepted, ""
        if not line.ended:
            line.tell(accepted)


def send(line: Line) -> None:
    """Raises: OSError when the peer does not read what is sent."""
    assert line.socket
    assert line.protocol
    line.unsent += line.protocol.data_to_send()
    while line.unsent:
        try:
            del line.unsent[: line.socket.send(line.unsent)]
        except BlockingIOError:
            if line.secure and not line.protocol.greeted:
                return  # until the handshake goes on
            raise ConnectionAbortedError("it does not read what is sent") from None


def receive(line: Line) -> None:
    """Read what is there. Raises: OSError when the peer has ended the connection, is about to, or speaks no HTTP/2."""
    assert line.socket
    assert line.protocol
    try:
        data = line.socket.recv(READ_BYTES)
    except BlockingIOError:
        return  # a part of what TLS has in one
    if not data:
        raise ConnectionResetError("it was closed")
    line.protocol.receive(data)
    if line.protocol.going_away or line.protocol.violated:
        raise ConnectionResetError("it takes no calls")
