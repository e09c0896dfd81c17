"""The unary server before a server of grpcio, in the process of a test; and a client that is no library."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from hpack import Decoder

from appliance.drivers.grpcserver import Server
from appliance.drivers.memory import Reserve
from appliance.multiplexer.unary_calls import Handler, UnaryCalls
from appliance.multiplexer.unary_server import PlainCalls, UnaryServer
from appliance.wire.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from appliance.wire.http2_headers import never_indexed
from testing.running import free_ports

SERVICE = "test.Plain"
MOST_FORWARDED = 4096
LIMIT = 64 * 2**20  # bytes of a message
WAIT_SECS = 20.0  # for what comes at once, on a busy machine
ROUNDS = 10  # of the loop, in which the connections that were aborted end
LENT = 2**30  # bytes of memory for large replies
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", LIMIT),
    ("grpc.max_send_message_length", LIMIT),
)
OWN_HEADERS = ((":method", "POST"), (":scheme", "http"), (":authority", "test"), ("te", "trailers"))


def path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def admit_all(path: str, context: Any) -> None:
    """Everybody may call everything."""


def unary(handler: Handler) -> grpc.RpcMethodHandler:
    """As grpcio has it, of bytes."""
    return grpc.unary_unary_rpc_method_handler(handler)


def grpc_server(handlers: Mapping[str, grpc.RpcMethodHandler], longest_connection_secs: int = 0) -> Server:
    """As the multiplexer's, but for its interceptor; it has not begun."""
    server = Server(64, LIMIT, shared_port=True, longest_connection_secs=longest_connection_secs)
    server.add(SERVICE, dict(handlers))
    return server


class ServerBefore:
    """Both of them. plain: the handlers by method, or whoever has the plain calls; behind: those of the other one."""

    def __init__(
        self,
        folder: Path,
        plain: Mapping[str, Handler] | PlainCalls,
        behind: Mapping[str, grpc.RpcMethodHandler],
        timeout_secs: float = 0,
        longest_connection_secs: Any = 0,
        authenticate: Callable[[str, Any], None] = admit_all,
        largest: int = LIMIT,
        lent: int = LENT,
        longest_behind_secs: int = 0,
        host: str | None = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if isinstance(plain, Mapping):
            by_path = {path(method): handler for method, handler in plain.items()}
            plain = UnaryCalls(by_path, authenticate, Reserve(lent), largest)
        self.calls, self.own_socket = plain, folder / "unary.sock"
        self.server = grpc_server(behind, longest_behind_secs)
        self.unary = UnaryServer(plain, folder / "behind.sock", timeout_secs, MOST_FORWARDED, longest_connection_secs)
        self.port = port or free_ports(1)[0]
        self.server.start(None, 0, None, self.unary.behind)
        self.unary.start(self.own_socket, host, self.port)
        self.channels: list[grpc.Channel] = []
        self.raw: list[RawClient] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self.channels:
            channel.close()
        for client in self.raw:
            client.close()
        self.unary.stop(time.monotonic())
        self.server.stop(0)
        asyncio.run_coroutine_threadsafe(self.end_all(), self.unary.loop).result(WAIT_SECS)
        self.unary.loop.call_soon_threadsafe(self.unary.loop.stop)
        self.unary.thread.join()
        self.unary.loop.close()

    async def end_all(self) -> None:
        """What a process of its own would leave to the kernel."""
        unary = self.unary
        while unary.connections or unary.idle or unary.connecting:
            for transport in [each.transport for each in unary.connections] + [each.transport for each in unary.idle]:
                transport.abort()
            await asyncio.sleep(0)
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    def channel(self, internal: bool = False, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """A connection of its own. internal: through the socket of the data folder."""
        where = f"unix:{self.own_socket}" if internal else f"127.0.0.1:{self.port}"
        self.channels.append(grpc.insecure_channel(where, options=(*OPTIONS, *options)))
        return self.channels[-1]

    def client(self, window: int = DEFAULT_WINDOW, internal: bool = False) -> RawClient:
        self.raw.append(RawClient(self.own_socket if internal else self.port, window))
        return self.raw[-1]

    def in_thread(self, act: Callable[[], Any]) -> Any:
        """What `act` gives in the thread of the unary server, to which its connections belong."""
        found: list[Any] = []
        self.unary.loop.call_soon_threadsafe(lambda: found.append(act()))
        until = time.monotonic() + WAIT_SECS
        while not found and time.monotonic() < until:
            time.sleep(0.002)
        return found[0]


class RawClient:
    """A client of HTTP/2 by hand. window: of each stream, as the server is told.

    headers, bodies, ends: what has come, by stream; trailers are among the headers. An end is "trailers" or the number
    of a reset.
    """

    def __init__(self, where: int | Path, window: int = DEFAULT_WINDOW) -> None:
        if isinstance(where, Path):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(where))
        else:
            self.socket = socket.create_connection(("127.0.0.1", where))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(0.05)
        self.decoder = Decoder()
        self.incoming = b""
        self.headers: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.ends: dict[int, str | int] = {}
        self.granted: dict[int, int] = {}  # by the server, beside the first windows
        self.goaway: tuple[int, int] | None = None  # the last stream, and the error
        self.pongs = 0
        self.closed = False
        self.next_stream = 1
        self.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))

    def send(self, data: bytes) -> None:
        self.socket.settimeout(WAIT_SECS)
        self.socket.sendall(data)
        self.socket.settimeout(0.05)

    def call(self, method: str, message: bytes, *more: tuple[str, str]) -> int:
        """A whole unary call."""
        stream = self.open(method, *more)
        self.body(stream, struct.pack(">BI", 0, len(message)) + message, ends=True)
        return stream

    def open(self, method: str, *more: tuple[str, str], ends: bool = False) -> int:
        """Its headers alone; more: those that are not every call's."""
        given = {key for key, _ in more}
        content = () if "content-type" in given else (("content-type", "application/grpc"),)
        own = tuple(pair for pair in OWN_HEADERS if pair[0] not in given)
        where = () if ":path" in given else ((":path", path(method)),)
        special = [pair for pair in (*own, *where, *more) if pair[0][:1] == ":"]
        others = [pair for pair in (*own, *content, *more) if pair[0][:1] != ":"]
        return self.open_block(never_indexed([*special, *others]), ends)

    def open_block(self, block: bytes, ends: bool = False) -> int:
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        pieces = [block[at : at + DEFAULT_FRAME_SIZE] for at in range(0, len(block), DEFAULT_FRAME_SIZE)] or [b""]
        for at, piece in enumerate(pieces):
            flags = (END_STREAM if ends and not at else 0) | (END_HEADERS if at == len(pieces) - 1 else 0)
            self.send(frame(CONTINUATION if at else HEADERS, flags, stream, piece))
        return stream

    def body(self, stream: int, data: bytes, ends: bool) -> None:
        pieces = [data[at : at + DEFAULT_FRAME_SIZE] for at in range(0, len(data), DEFAULT_FRAME_SIZE)] or [b""]
        last = len(pieces) - 1
        self.send(b"".join(frame(DATA, END_STREAM * (ends and at == last), stream, x) for at, x in enumerate(pieces)))

    def grant(self, stream: int, size: int) -> None:
        self.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size)))

    def reset(self, stream: int) -> None:
        self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def ping(self) -> None:
        self.send(frame(PING, 0, 0, b"12345678"))

    def wait(self, holds: Callable[[], object], secs: float = WAIT_SECS) -> None:
        """Read until it holds."""
        until = time.monotonic() + secs
        while not holds():
            assert time.monotonic() < until, (self.headers, self.ends, self.goaway, self.closed)
            assert not self.closed, f"the connection was closed: {self.ends}, {self.goaway}"
            self.read()

    def wait_for_close(self, secs: float = WAIT_SECS) -> None:
        until = time.monotonic() + secs
        while not self.closed:
            assert time.monotonic() < until, "the connection lives"
            self.read()

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """The headers and trailers of a call, and its message, when it has ended."""
        self.wait(lambda: stream in self.ends)
        return self.headers.get(stream, {}), self.bodies.get(stream, b"")[5:]

    def read(self) -> None:
        """What has come, if anything does within a moment."""
        try:
            data = self.socket.recv(2**18)
        except TimeoutError:
            return
        except ConnectionResetError:
            data = b""
        self.closed = not data
        self.incoming += data
        for kind, flags, stream, payload in self.frames():
            self.take(kind, flags, stream, payload)

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        while len(self.incoming) >= 9 and len(self.incoming) >= 9 + (size := int.from_bytes(self.incoming[:3], "big")):
            head, payload = self.incoming[:9], self.incoming[9 : 9 + size]
            self.incoming = self.incoming[9 + size :]
            yield head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0, b""))
        elif kind == HEADERS:
            decoded = {str(key): str(value) for key, value in self.decoder.decode(payload)}
            self.headers[stream] = self.headers.get(stream, {}) | decoded
            if flags & END_STREAM:
                self.ends[stream] = "trailers"
        elif kind == DATA:
            self.bodies[stream] = self.bodies.get(stream, b"") + payload
        elif kind == RST_STREAM:
            self.ends.setdefault(stream, int.from_bytes(payload, "big"))
        elif kind == WINDOW_UPDATE:
            self.granted[stream] = self.granted.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
        elif kind == PING and flags & ACK:
            self.pongs += 1
        elif kind == PING:
            self.send(frame(PING, ACK, 0, payload))

    def close(self) -> None:
        self.socket.close()
