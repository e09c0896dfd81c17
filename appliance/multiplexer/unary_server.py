"""The server on the gRPC port: it answers plain unary calls in its one thread, and forwards all others to grpcio.

grpcio hands every call from thread to thread, and takes 160 to 230 us of CPU for an empty one. Here `asyncio` reads all
connections, and who answers does so at once, as a greenlet that waits for nothing but its replica (`unary_calls`). What
is not plain goes on as it came, through a socket of the data folder, to a server of grpcio: streams, other methods,
batches of more than a few rows, messages that are large, compressed or late, and every call that would have to wait for
more than a reply. So there is no second way to do anything but the plain case, and what cannot be is refused in
grpcio's words.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from appliance.core.addresses import address
from appliance.core.problems import Kind, Problem
from appliance.files.sockets import listening
from appliance.multiplexer.forwarding import BackendConnection
from appliance.multiplexer.served_connection import ServedCall, ServedConnection

BACKLOG = 4096
ACCEPTED_AT_ONCE = 64  # before others have their turn
READ_BYTES = 2**16  # likewise, of one connection
MOST_UNREAD = 2**26  # bytes of replies that wait for their callers; with more, calls have the limits of grpcio's server
TICK_SECS = 1.0
DRAIN_POLL_SECS = 0.02


class PlainCalls(Protocol):
    """Who answers here; in the thread of the server."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """In whose thread that will be."""

    def takes(self, path: str) -> bool:
        """Whether calls of this method may be answered here."""

    def admit(self, call: ServedCall) -> bool:
        """Whether the call may be made; it has been refused otherwise."""

    def answer(self, call: ServedCall, message: bytes) -> None:
        """Have it answered or forwarded, now or later."""


class UnaryServer:
    """One thread for all connections. What is not said to be for any thread is for that one alone.

    behind: the socket of grpcio's server. timeout_secs: how long a caller may not read its answers; 0: for ever.
    most_forwarded: calls at the server behind at once. longest_connection_secs: a client is then asked to connect
    again; 0: never.
    """

    def __init__(
        self,
        calls: PlainCalls,
        behind: Path,
        timeout_secs: float,
        most_forwarded: int,
        longest_connection_secs: int = 0,
        goes_on: Callable[[], object] = lambda: None,
    ) -> None:
        """goes_on: called each second by the thread."""
        self.goes_on = goes_on
        self.calls, self.behind = calls, behind
        self.timeout_secs, self.longest_connection_secs = timeout_secs, longest_connection_secs
        self.loop = asyncio.new_event_loop()
        calls.begin(self.loop)
        self.buffer = bytearray(READ_BYTES)  # into which each connection is read
        self.connections: set[ServedConnection] = set()
        self.unread, self.most_unread = 0, MOST_UNREAD
        self.forwarded, self.most_forwarded = 0, most_forwarded
        self.idle: list[BackendConnection] = []  # connections to the server behind, for the next call
        self.connecting: set[asyncio.Task[None]] = set()
        self.servers: list[asyncio.Server] = []
        self.thread = threading.Thread(target=self.run, name="unary", daemon=True)

    # -- of any thread ------------------------------------------------------------------------------------------------

    def start(self, own_socket: Path, host: str | None, port: int) -> None:
        """Listen on a socket for this user alone and, where there is a host, on the port.

        Raises: Problem that names the port when it is taken.
        """
        try:
            public = listening(host, port) if host is not None else []
        except OSError as error:
            where = address(host or "", port)
            message = f"Cannot listen on {where}: is the port in use? ({error.strerror or error})"
            raise Problem(Kind.UNAVAILABLE, "PORT_CONFLICT", message) from error
        # They are served as soon as the loop runs.
        self.loop.run_until_complete(self.listen(public, own_listener(own_socket)))
        self.thread.start()

    def stop(self, until: float) -> None:
        """Take no new call, and wait for those that are answered here; until: of time.monotonic.

        What crosses our goodbye is still taken: the server behind has to live until clients have heard it.
        """
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.refuse_new(), self.loop).result(max(0.0, until - time.monotonic()))
        self.wait_while(lambda connection: connection.arriving or connection.running, until)
        heard = min(until, time.monotonic() + TICK_SECS)
        self.wait_while(lambda each: not (each.is_internal or each.protocol.going_away or each.is_closing), heard)

    def wait_for_ends(self, until: float) -> None:
        """For what the server behind has answered to go out, and for clients to see it. Our own need not: they repeat
        what crosses the end."""
        self.wait_while(lambda connection: connection.protocol.streams or not connection.is_internal, until)

    def wait_while(self, holds: Callable[[ServedConnection], object], until: float) -> None:
        """While it holds of a connection."""
        while any(map(holds, list(self.connections))) and time.monotonic() < until:
            time.sleep(DRAIN_POLL_SECS)

    # -- of its own ---------------------------------------------------------------------------------------------------

    async def listen(self, public: list[socket.socket], own: socket.socket) -> None:
        for each in public:
            make = partial(ServedConnection, self, False)
            self.servers.append(await self.loop.create_server(make, sock=each, backlog=ACCEPTED_AT_ONCE))
        make = partial(ServedConnection, self, True)
        self.servers.append(await self.loop.create_unix_server(make, sock=own, backlog=ACCEPTED_AT_ONCE))
        for each in (*public, own):  # asyncio has set the other, which is as many as it accepts in one go
            each.listen(BACKLOG)

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.tick()
        self.loop.run_forever()

    def tick(self) -> None:
        self.loop.call_later(TICK_SECS, self.tick)
        self.goes_on()
        now = time.monotonic()
        for connection in list(self.connections):
            connection.tick(now)

    async def refuse_new(self) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.connections):
            connection.say_goodbye()

    def backend(self) -> BackendConnection:
        """A connection to the server behind for one call; a new one may still be connecting."""
        while self.idle:
            if (idle := self.idle.pop()).protocol.reusable and not idle.transport.is_closing():
                return idle
            idle.transport.close()
        backend = BackendConnection(self)
        task = self.loop.create_task(self.connect(backend))
        self.connecting.add(task)
        task.add_done_callback(self.connecting.discard)
        return backend

    async def connect(self, backend: BackendConnection) -> None:
        try:
            await self.loop.create_unix_connection(lambda: backend, str(self.behind))
        except OSError as error:
            backend.connection_lost(error)


def own_listener(path: Path) -> socket.socket:
    """A socket for this user alone. It is born under a name of its own: it replaces a predecessor's without a moment in
    which there is none."""
    born = path.with_name(f"{os.getpid()}.unary.sock")
    born.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o077)
    try:
        listener.bind(str(born))
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    os.replace(born, path)
    return listener
