"""A peer of our own for TLS: one connection, one request, and how it went."""

from __future__ import annotations

import socket
import ssl
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpack import Decoder, Encoder

from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.running import RunningAppliance
from tests.security import Caller

LISTENERS = ("rest", "grpc", "gateway")
SECS = 15.0
INFO = "/tei_multiplexer.v1.TeiMultiplexer/Info"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Outcome(StrEnum):
    SERVED = "served"
    DENIED = "denied"  # 401, 403, UNAUTHENTICATED or PERMISSION_DENIED, and nothing else
    CLOSED = "closed"  # not one byte of an answer
    TOLD = "told"  # in the clear, that this port speaks TLS


REFUSED = (Outcome.DENIED, Outcome.CLOSED)
INFO_MESSAGE = mux.InfoRequest(target=mux.Target(instance_name="minilm")).SerializeToString()


@dataclass(frozen=True)
class Ask:
    """One gRPC call, byte for byte. sent: metadata, also such as no client of gRPC would send."""

    path: str
    message: bytes = b""
    sent: tuple[tuple[str, str], ...] = ()


def empty(path: str) -> Ask:
    """Without a message, but for Info."""
    return Ask(path, INFO_MESSAGE if path == INFO else b"")


@dataclass
class Knock:
    """How one connection went. ``server``: the certificate that was shown; ``session``: to be resumed."""

    outcome: Outcome
    server: bytes | None = None
    session: ssl.SSLSession | None = None
    resumed: bool | None = None


def port_of(node: RunningAppliance, listener: str) -> int:
    return {"rest": node.api_port, "grpc": node.grpc_port, "gateway": node.http_port}[listener]


def context_of(caller: Caller, **versions: ssl.TLSVersion) -> ssl.SSLContext:
    assert caller.trusts
    context = ssl.create_default_context(cafile=str(caller.trusts.pem))
    for name, version in versions.items():
        setattr(context, name, version)
    if caller.shows:
        context.load_cert_chain(caller.shows.chain, caller.shows.key_path)
    return context


def knock(
    node: RunningAppliance,
    listener: str,
    context: ssl.SSLContext | None,
    path: str = "",
    session: ssl.SSLSession | None = None,
    ask: Ask | None = None,
) -> Knock:
    """One connection with one request. context: none to speak in the clear. path: by default one that answers.

    ask: of gRPC, the whole call in place of a path.
    """
    plain = socket.create_connection(("127.0.0.1", port_of(node, listener)), timeout=SECS)
    with plain:
        if context is None:
            return Knock(spoken(plain, listener, path, ask))
        if listener == "grpc":
            context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(plain, server_hostname="localhost", session=session) as wrapped:
                found = Knock(Outcome.CLOSED, wrapped.getpeercert(binary_form=True), resumed=wrapped.session_reused)
                found.outcome = spoken(wrapped, listener, path, ask)
                found.session = wrapped.session  # of TLS 1.3 only here
                return found
        except TimeoutError:
            raise AssertionError(f"{listener}: neither an answer nor an end") from None
        except OSError:  # what TLS says among them
            return Knock(Outcome.CLOSED)


def spoken(connection: socket.socket, listener: str, path: str, ask: Ask | None = None) -> Outcome:
    try:
        if listener == "grpc":
            return grpc_outcome(connection, ask or empty(path or INFO))
        return http_outcome(connection, path)
    except TimeoutError:
        raise AssertionError(f"{listener}: neither an answer nor an end") from None
    except OSError:
        return Outcome.CLOSED


def http_outcome(connection: socket.socket, path: str) -> Outcome:
    head = f"GET {path or '/openapi.json'} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode())
    answer = b""
    while part := connection.recv(65536):
        answer += part
    if not answer:
        return Outcome.CLOSED
    status = int(answer.split()[1])
    if status == 400 and b"TLS" in answer and not isinstance(connection, ssl.SSLSocket):
        return Outcome.TOLD
    return {200: Outcome.SERVED, 401: Outcome.DENIED, 403: Outcome.DENIED}[status]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_outcome(connection: socket.socket, ask: Ask) -> Outcome:
    """A unary call as bytes of HTTP/2; of the answer only the status is read."""
    headers = {":method": "POST", ":scheme": "https", ":path": ask.path, ":authority": "localhost"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    block = Encoder().encode([*headers.items(), *ask.sent])
    body = struct.pack(">BI", 0, len(ask.message)) + ask.message
    connection.sendall(PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, body))
    decoder, buffer, status = Decoder(), b"", ""
    while not status:
        part = connection.recv(65536)
        if not part:
            return Outcome.CLOSED
        buffer += part
        while len(buffer) >= 9 and len(buffer) >= 9 + (size := int.from_bytes(buffer[:3], "big")):
            kind, flags, payload, buffer = buffer[3], buffer[4], buffer[9 : 9 + size], buffer[9 + size :]
            if kind == 4 and not flags & 1:
                connection.sendall(frame(4, 1, 0, b""))
            if kind == 7 or (kind == 3 and not status):  # GOAWAY, RST_STREAM
                return Outcome.CLOSED
            if kind == 1:
                found: dict[Any, Any] = dict(decoder.decode(payload))
                status = found.get("grpc-status", status)
    assert status in ("0", "7", "16"), status
    return Outcome.SERVED if status == "0" else Outcome.DENIED
