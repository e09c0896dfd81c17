"""gRPC calls to replicas and the multiplexer: sockets around `wire.http2` and `wire.calls`, a call at a time on each.

Why not grpcio's client: its threads hand every message over, at about 120 microseconds of CPU a message on a stream and
500 a unary call (grpcio 1.85, 2 cores); here a whole slice of requests is one write, and what has arrived is cut into
messages by one loop, at about a tenth of that. A thread that waits for its reply makes two system calls, one that
writes and one that waits and reads: at each of them another thread takes the interpreter, and it has to be given back.
Because a connection carries one call at a time, cancellation is simple: closing the socket.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress

from appliance.files.securesocket import Secure, SecureSocket
from appliance.files.sockets import bytes_acked, notice_loss, split
from appliance.files.sockets import connected as local_connection
from appliance.wire.calls import (
    CallFailed,
    ClientCall,
    Code,
    Metadata,
    Status,
    framed,
    metadata_headers,
    request_headers,
)
from appliance.wire.http2 import ClientConnection, ProtocolViolated, StreamEvent

Wait = Callable[[socket.socket | SecureSocket, int, float], None]  # for events of `select.poll`, for so many seconds

UNIX = "unix:"  # before the path of a socket, in an address
READ_BYTES = 2**16  # taken from memory before the wait for them, by each call that waits
CONNECT_SECS = 1.0
POLL_SECS = 1.0  # how often a sender whose socket is full looks whether its call is over
FRESH_SECS = 0.05  # so long after a call the connection counts as alive: the call would have seen its end


class Connection:
    """One HTTP/2 connection to ``host:port``. ``idle`` says whether another call may be made on it.

    secure: makes the connected socket one with TLS. metadata: of every call, besides its own. repeatable: what was in
    work when the connection was lost is asked again as if it had never arrived. Raises: OSError when no process
    listens, or is not trusted.
    """

    def __init__(
        self,
        address: str,
        secure: Secure | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        repeatable: bool = False,
    ) -> None:
        self.authority = "localhost" if address.startswith(UNIX) else address  # Envoy takes no path for it
        self.repeatable = repeatable
        self.metadata = metadata
        self.socket = connected(address, secure)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.protocol = ClientConnection()
        self.unsent = bytearray()  # which the socket has not taken yet
        self.later = deque[bytes]()  # messages that are sent one by one, as replies come
        self.idle = True
        self.lost = False  # what was written did not go out: no other call, also where this one has its status
        self.shut = False  # by us: the end that is read is not the peer's
        # The opening itself counts as one. Under TLS other bytes go out than those that are sent here.
        self.acked_at_first = 0 if secure else bytes_acked(self.socket)
        self.sent = self.sent_before = 0  # bytes that the socket took, and those before the call
        self.rested_at = 0.0  # when the last call ended; time.monotonic()
        self.current: ClientCall | None = None
        self.lock = threading.Lock()

    def close(self) -> None:
        self.idle = False
        self.socket.close()

    def abort(self, call: ClientCall) -> None:
        """End a call, from any thread: its own thread sees the end of the connection. Nothing once it is over."""
        with self.lock:
            if self.current is call:
                self.shut_down()

    def cut(self) -> None:
        """End whatever runs on the connection, from any thread, as if the peer had died."""
        with self.lock:
            if self.current:
                self.shut_down()

    def shut_down(self) -> None:
        self.lost = self.shut = True  # also where the call has its whole answer by now: no other call may follow it
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended by itself

    def fresh(self) -> bool:
        """Whether the connection still lives, after what the peer may have sent since the last call."""
        if time.monotonic() - self.rested_at < FRESH_SECS:
            return self.idle
        try:
            events = self.read() if self.poll.poll(0) else ()
        except OSError:
            self.idle = False
        else:
            violated = any(isinstance(event, ProtocolViolated) for event in events)
            self.idle = self.idle and not violated and not self.protocol.going_away
        return self.idle

    def wait_for_greeting(self, within_secs: float) -> None:
        """Until the peer has accepted the connection. Raises: OSError when it does not, or not in time."""
        until = time.monotonic() + within_secs
        try:
            while not self.protocol.greeted:
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError("the connection was not accepted in time")
                self.write()
                self.read(left)
        except OSError:
            self.close()
            raise

    # -- one call -----------------------------------------------------------------------------------------------------

    def open(self, path: str, metadata: Metadata) -> ClientCall:
        """Start a call without any message."""
        self.idle = False
        self.sent_before = self.sent
        call = ClientCall()
        sent = metadata_headers([*self.metadata, *metadata] if self.metadata else metadata)
        self.protocol.open(request_headers(path, self.authority), sent)
        with self.lock:
            self.current = call
        return call

    def begin(
        self, path: str, messages: Sequence[bytes], metadata: Metadata, one_at_a_time: bool = False
    ) -> ClientCall:
        """Start a call. one_at_a_time: send each message only when the one before it was answered."""
        call = self.open(path, metadata)
        self.later = deque(messages[1:] if one_at_a_time else ())
        self.protocol.send(framed(messages[:1] if one_at_a_time else messages), end=not self.later)
        return call

    def replies(self, call: ClientCall, check: Callable[[], float], wait: Wait | None = None) -> Generator[bytes]:
        """The replies of a call in order; afterwards it has its headers and its status.

        check() is called all the time: it may raise to end the call, and returns the seconds after which it wants to be
        called again, if nothing has arrived by then. wait: does the waiting, instead of the socket and of `poll`.
        Raises: CallFailed for every status but OK.
        """
        try:
            while not call.status:
                for message in call.messages(self.exchange(check, wait)):
                    if self.later:
                        self.protocol.send(framed((self.later.popleft(),)), end=not self.later)
                    yield message
        except OSError as error:
            raise self.connection_lost(error) from error
        finally:
            self.end(call)

    def connection_lost(self, error: OSError) -> CallFailed:
        status = Status(Code.UNAVAILABLE, f"{error.strerror or error}")
        begun = self.protocol.greeted and not self.repeatable and self.has_arrived(error)
        return CallFailed(status, answered=False, begun=begun)

    def has_arrived(self, error: OSError) -> bool:
        """Whether the peer may have had a byte of the call whose connection ended with ``error``.

        A connection that has lived is found ended only by the call that is written on it. With its own end a peer
        acknowledges what came until then, so the rest never arrived. A reset tells nothing: what was read before it may
        wait for its acknowledgement for ever, as Linux puts it off by up to 40 ms.
        """
        if self.sent == self.sent_before:
            return False
        ended_by_peer = error.errno in (None, errno.EPIPE) and not self.shut
        if not ended_by_peer or not self.acked_at_first:
            return True
        return bytes_acked(self.socket) - self.acked_at_first > self.sent_before

    def end(self, call: ClientCall) -> None:
        with self.lock:
            self.current = None
        self.idle = call.status is not None and self.protocol.reusable and not self.lost
        self.rested_at = time.monotonic()
        if not self.idle:
            self.close()

    def exchange(self, check: Callable[[], float], wait: Wait | None) -> Sequence[StreamEvent]:
        """Write what may be written, read what is there; waits for either as long as ``check`` says."""
        written = self.write()
        wait_secs = check()
        if wait:
            wait(self.socket, select.POLLIN if written else select.POLLIN | select.POLLOUT, wait_secs)
            return self.read()
        if written:
            return self.read(wait_secs)
        self.poll.modify(self.socket, select.POLLIN | select.POLLOUT)
        ready = self.poll.poll(wait_secs * 1000)
        self.poll.modify(self.socket, select.POLLIN)
        if any(events & (select.POLLIN | select.POLLHUP | select.POLLERR) for _, events in ready):
            return self.read()
        return ()

    def write(self) -> bool:
        """Whether the socket took all that may be sent."""
        while data := self.unsent or self.protocol.data_to_send():
            self.unsent = data
            try:
                sent = self.socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                self.lost = True
                raise
            self.sent += sent
            del data[:sent]
        return True

    def read(self, wait_secs: float = 0.0) -> Sequence[StreamEvent]:
        data = self.receive(wait_secs)
        return self.protocol.receive(data) if data else ()

    def receive(self, wait_secs: float) -> bytes:
        """What has arrived, if anything. wait_secs: for how long to wait for it; one system call does both."""
        if wait_secs:
            microseconds = max(1, math.ceil(wait_secs * 1e6))
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(microseconds, 10**6))
            )
        try:
            data = self.socket.recv(READ_BYTES, 0 if wait_secs else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise ConnectionResetError("the connection was closed")
        return data


def connected(address: str, secure: Secure | None) -> socket.socket | SecureSocket:
    """Raises: OSError; then no socket is left open."""
    if address.startswith(UNIX):
        local = local_connection(address.removeprefix(UNIX), CONNECT_SECS)
        local.settimeout(None)
        return local
    plain = socket.create_connection(split(address), timeout=CONNECT_SECS)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_loss(plain)
        connection: socket.socket | SecureSocket = plain
        if secure:
            connection = session = secure(plain)
            session.handshake(CONNECT_SECS)
        plain.settimeout(None)
    except OSError:
        plain.close()
        raise
    return connection


class MessageStream:
    """A call whose messages are sent one by one, as ``messages`` gives them, while its replies are read.

    A thread of its own takes the messages: the next one when the peer's windows have let the one before through. It
    ends with the messages, or with the call. It never touches the protocol without the lock of ``changed``.
    """

    def __init__(self, connection: Connection, path: str, messages: Iterator[bytes], metadata: Metadata) -> None:
        self.connection = connection
        self.protocol = connection.protocol
        self.call = connection.open(path, metadata)
        self.changed = threading.Condition()
        self.over = False
        self.writable = select.poll()
        self.writable.register(connection.socket, select.POLLOUT)
        self.sender = threading.Thread(target=self.send, args=(messages,), name="stream", daemon=True)

    def cancel(self) -> None:
        """End the call, from any thread: the reader of its replies sees the end of the connection."""
        self.connection.abort(self.call)

    def replies(self, check: Callable[[], float]) -> Generator[bytes]:
        """As `Connection.replies`."""
        try:
            self.sender.start()
            while not self.call.status:
                yield from self.call.messages(self.read(check()))
        except OSError as error:
            with self.changed:  # the sender may be about to count what it wrote
                lost = self.connection.connection_lost(error)
            raise lost from error
        finally:
            with self.changed:
                self.over = True
                self.connection.end(self.call)
                self.changed.notify_all()

    def read(self, wait_secs: float) -> Sequence[StreamEvent]:
        data = self.connection.receive(wait_secs)
        if not data:
            return ()
        with self.changed:
            events = self.protocol.receive(data)
            with suppress(OSError):  # what has come counts; the next look at the connection tells that it is lost
                self.connection.write()
            self.changed.notify_all()
        return events

    def send(self, messages: Iterator[bytes]) -> None:
        """In a thread."""
        finished = False
        try:
            finished = all(self.write(framed((message,)), end=False) for message in messages)
            finished = finished and self.write(b"", end=True)
        except OSError:
            finished = True  # the reader sees it, too
        finally:
            if not finished:  # otherwise the reader would wait for ever
                self.cancel()

    def write(self, data: bytes, end: bool) -> bool:
        """Wait until all of it has gone out; whether it has, or the call is over."""
        with self.changed:
            if not self.over:
                self.protocol.send(data, end)
        while True:
            with self.changed:
                if self.over:
                    return False
                if self.connection.write():
                    if not self.protocol.held_back:
                        return True
                    self.changed.wait()
                    continue
            self.writable.poll(POLL_SECS * 1000)
