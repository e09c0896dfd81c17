"""A gRPC call as its client sees it, without a socket: messages, metadata and how it ended.

Beneath it is the open stream of `wire.http2`; events of that go in, and messages come out. The format: "gRPC over
HTTP/2", PROTOCOL-HTTP2.md of grpc.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from appliance.wire.http2 import (
    DataReceived,
    HeadersReceived,
    Incomplete,
    ProtocolViolated,
    StreamEvent,
    StreamReset,
)
from appliance.wire.http2_headers import Headers

MOST_METHODS = 1024  # of all replicas, whose headers are kept
MESSAGE_HEAD = 5  # bytes: whether it is compressed, and its length
TRANSPORTS_OWN = {"content-type", "trailer", "date", "grpc-encoding", "grpc-accept-encoding"}

Metadata = list[tuple[str, str | bytes]]


class Code(IntEnum):
    """The statuses of gRPC by their numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# By the error of a reset stream; "Errors" in the format's description. Every other one is INTERNAL.
RESET_CODES = {7: Code.UNAVAILABLE, 8: Code.CANCELLED, 11: Code.RESOURCE_EXHAUSTED}


class Status(NamedTuple):
    """How a call ended. code: as it travels, so it may be none of `Code`."""

    code: int
    details: str = ""
    trailers: Sequence[tuple[str, str | bytes]] = ()


class CallFailed(Exception):
    """A call that ended with another status than OK, whatever carried it.

    answered: by the server, or only by the transport. begun: the server may have worked on it; False when it was never
    reached.
    """

    def __init__(self, status: Status, answered: bool, begun: bool = True) -> None:
        super().__init__(status.details)
        self.status = status
        self.answered = answered
        self.begun = begun

    @property
    def server_ends(self) -> bool:
        """Whether the server is not there, or ending: another one may be asked. Nobody here cancels a call but by
        closing its connection, so a server that does is ending; grpcio's cancels what it has not begun."""
        return self.status.code in (Code.UNAVAILABLE, Code.CANCELLED)


class ClientCall:
    """One call: what has arrived of its answer.

    headers: the initial metadata. status: None before the server has ended the call.
    """

    def __init__(self) -> None:
        self.incomplete = Incomplete()
        self.headers: Metadata = []
        self.code: int | None = None
        self.details = ""
        self.code_of_http = Code.UNAVAILABLE  # of a reply that is none of gRPC
        self.status: Status | None = None

    def messages(self, events: Iterable[StreamEvent]) -> Iterator[bytes]:
        """The messages that are complete with these events. Raises: CallFailed for every end but OK."""
        for event in events:
            if isinstance(event, DataReceived):
                yield from self.cut(event.data)
                if event.ends:
                    self.end([])
            elif isinstance(event, HeadersReceived):
                self.take_headers(event.headers, event.ends)
            elif isinstance(event, StreamReset):
                details = f"the stream was reset with HTTP/2 error {event.error}"
                raise CallFailed(Status(RESET_CODES.get(event.error, Code.INTERNAL), details), answered=False)
            elif isinstance(event, ProtocolViolated):
                raise CallFailed(Status(Code.INTERNAL, event.details), answered=False)
            else:
                raise CallFailed(Status(Code.UNAVAILABLE, "the server is going away"), answered=False, begun=False)

    def cut(self, data: bytes) -> Iterator[bytes]:
        data = self.incomplete.join(data)
        at, size, needed = 0, len(data), MESSAGE_HEAD
        while size - at >= MESSAGE_HEAD:
            needed = MESSAGE_HEAD + int.from_bytes(data[at + 1 : at + MESSAGE_HEAD], "big")
            if data[at]:
                details = "the reply is compressed, which was not offered"
                raise CallFailed(Status(Code.INTERNAL, details), answered=False)
            if at + needed > size:
                break
            yield data[at + MESSAGE_HEAD : at + needed]
            at, needed = at + needed, MESSAGE_HEAD
        if at < size:
            self.incomplete.keep(data[at:], needed)

    def take_headers(self, headers: Headers, ends: bool) -> None:
        metadata: Metadata = []
        for key, value in headers:
            if key == "grpc-status":
                self.code = int(value) if value.isdigit() else Code.INTERNAL
            elif key == "grpc-message":
                self.details = unquote(value)
            elif key == ":status" and value != "200":
                self.details = self.details or f"HTTP status {value}"
                self.code_of_http = Code.UNIMPLEMENTED if value == "404" else Code.UNAVAILABLE
            elif not key.startswith(":") and key not in TRANSPORTS_OWN:
                metadata.append((key, decoded(key, value)))
        if ends:
            self.end(metadata)
        else:
            self.headers += metadata

    def end(self, trailers: Metadata) -> None:
        """Raises: CallFailed for every end but OK."""
        if self.code is None:
            status = Status(self.code_of_http, self.details or "the call ended without a status", trailers)
            raise CallFailed(status, answered=False)
        self.status = Status(self.code, self.details, trailers)
        if self.code:
            raise CallFailed(self.status, answered=True)


@lru_cache(MOST_METHODS)
def request_headers(path: str, authority: str) -> tuple[tuple[str, str], ...]:
    """Those that every call of a method has."""
    own = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority))
    return (*own, ("te", "trailers"), ("content-type", "application/grpc"))


def timeout_header(seconds: float) -> str:
    """grpc-timeout: at most eight digits and a unit; rounded up, so that our own deadline is the one that is met."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000) + 1
    return f"{milliseconds}m" if milliseconds < 10**8 else f"{math.ceil(seconds)}S"


def metadata_headers(metadata: Metadata) -> Headers:
    return [(key, coded(value)) for key, value in metadata]


def framed(messages: Sequence[bytes]) -> bytes:
    """Messages as they travel, one behind the other."""
    return b"".join([part for message in messages for part in (struct.pack(">BI", 0, len(message)), message)])


def coded(value: str | bytes) -> str:
    """Metadata as a header: binary values (`-bin`) travel as base64."""
    return base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value


def decoded(key: str, value: str) -> str | bytes:
    return base64.b64decode(value + "=" * (-len(value) % 4)) if key.endswith("-bin") else value
