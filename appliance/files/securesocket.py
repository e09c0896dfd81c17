"""TLS over a socket that is already connected, with the few calls of a socket that our clients make.

`ssl.SSLSocket` takes no flags, and one thread at a time; a call of ours writes in one thread while another one reads.
Here the encryption works in memory, and the socket beneath it stays as it is.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

Secure = Callable[[socket.socket], "SecureSocket"]  # of a socket that is connected

READ_BYTES = 2**16
RECORD_BYTES = 2**14  # encrypted at once


class SecureSocket:
    """Thread-safe for one reader and one writer. A `send` that raises BlockingIOError is repeated with the same data.

    Raises: OSError, as a socket does; ssl.SSLError is one.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.session = context.wrap_bio(self.incoming, self.outgoing, server_hostname=server_name)
        self.lock = threading.Lock()
        self.unsent = b""  # encrypted, and not taken by the socket yet
        self.encrypted = 0  # bytes of the caller's that are in there
        self.ended = False
        self.fileno = plain.fileno
        self.setsockopt, self.getsockopt, self.settimeout = plain.setsockopt, plain.getsockopt, plain.settimeout
        self.shutdown, self.close = plain.shutdown, plain.close

    def handshake(self, within_secs: float) -> None:
        """Until both sides agree. Raises: OSError, TimeoutError among them."""
        until = time.monotonic() + within_secs
        while True:
            with self.lock:
                try:
                    self.session.do_handshake()
                    return self.flush(0)
                except ssl.SSLWantReadError:
                    self.flush(0)
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("the TLS handshake took too long")
            self.plain.settimeout(left)
            self.feed(self.plain.recv(READ_BYTES))

    def send(self, data: bytes | bytearray, flags: int = 0) -> int:
        """How much of it was taken. Raises: BlockingIOError while nothing more is."""
        with self.lock:
            self.flush(flags)
            if not self.encrypted:
                try:
                    self.encrypted = self.session.write(memoryview(data)[:RECORD_BYTES])
                except ssl.SSLWantReadError:
                    self.flush(flags)
                    raise BlockingIOError("the TLS handshake goes on") from None
                self.flush(flags)
            taken, self.encrypted = self.encrypted, 0
            return taken

    def flush(self, flags: int) -> None:
        """Raises: BlockingIOError unless the socket has taken all of it."""
        self.unsent += self.outgoing.read()
        while self.unsent:
            sent = self.plain.send(self.unsent, flags)
            self.unsent = self.unsent[sent:]

    def recv(self, size: int, flags: int = 0) -> bytes:
        """What has arrived, all of it; nothing at the end. Raises: BlockingIOError as a socket does, and where a part
        has come: to wait for the rest is for those who know until when."""
        with self.lock:
            if (data := self.decrypted()) or self.ended:
                return data
        self.feed(self.plain.recv(size, flags))
        with self.lock:
            if (data := self.decrypted()) or self.ended:
                return data
        raise BlockingIOError("a part of what TLS has in one")

    def feed(self, data: bytes) -> None:
        with self.lock:
            if data:
                self.incoming.write(data)
            else:
                self.incoming.write_eof()

    def decrypted(self) -> bytes:
        """All that can be read without the socket."""
        parts = []
        while not self.ended:
            try:
                part = self.session.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                part = b""
            self.ended = not part
            parts.append(part)
        self.reply()
        return b"".join(parts)

    def reply(self) -> None:
        """Send what reading has made: of the handshake, of new keys. What does not fit goes with the next `send`."""
        if self.encrypted or not self.outgoing.pending:
            return
        try:
            self.flush(socket.MSG_DONTWAIT)
        except OSError:
            pass  # what was read counts
