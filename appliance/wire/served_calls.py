"""A gRPC call as its server sees it, without a socket: what its first headers ask for, and how its reply travels.

`wire.calls` has the client's side. The format: "gRPC over HTTP/2", PROTOCOL-HTTP2.md of grpc.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from appliance.wire.calls import MESSAGE_HEAD, coded, decoded
from appliance.wire.http2_headers import HeaderTuple

CONTENT_TYPE = ("content-type", "application/grpc")
REPLY_BEGIN: HeaderTuple = ((":status", "200"), CONTENT_TYPE, ("grpc-accept-encoding", "identity, deflate, gzip"))
TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
LARGEST_PLAIN = 2**14  # bytes of headers: more are for grpcio, which may refuse them
UNIT_SECS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Of a connection (RFC 9113, section 8.2.2) or of a message that is another one behind us.
CONNECTIONS_OWN = {
    *("connection", "content-length", "host", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"),
}
# What a handler is not told: the transport's own. Beside them all that begins with ":" or with "grpc-".
TRANSPORTS_OWN = CONNECTIONS_OWN | {"content-type", "te"}
OK: HeaderTuple = (("grpc-status", "0"),)
MESSAGE_SAFE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # all of ASCII that is printable, but the percent sign


class Request(NamedTuple):
    """The first headers of a call, as they came and as they are read.

    timeout_secs: None for a caller who waits for ever. is_plain: nothing about it needs more than is here. All others
    are for the gRPC library, which also has the words for those that cannot be.
    """

    headers: HeaderTuple
    path: str
    metadata: tuple[tuple[str, str | bytes], ...]
    timeout_secs: float | None
    is_plain: bool


@lru_cache(64)
def request_of(headers: HeaderTuple) -> Request:
    """Of the headers as they came. Those of a client's calls are mostly the same."""
    special = {key: value for key, value in headers if key[:1] == ":" or key.startswith(("grpc-", "content-type"))}
    timeout = special.get("grpc-timeout")
    match = TIMEOUT.fullmatch(timeout) if timeout else None
    is_plain = (
        special.get(":method") == "POST"
        and special.get("content-type") == CONTENT_TYPE[1]
        and special.get("grpc-encoding", "identity") == "identity"
        and (timeout is None or match is not None)
        and sum(len(key) + len(value) for key, value in headers) < LARGEST_PLAIN
        and all(key and key.isascii() and value.isascii() and key == key.lower() for key, value in headers)
    )
    metadata: list[tuple[str, str | bytes]] = []
    for key, value in headers:
        if key[:1] == ":" or key.startswith("grpc-") or key in TRANSPORTS_OWN:
            continue
        try:
            metadata.append((key, decoded(key, value)))
        except ValueError:  # no base64
            is_plain = False
    secs = int(match[1]) * UNIT_SECS[match[2]] if match else None
    return Request(headers, special.get(":path", ""), tuple(metadata), secs, is_plain)


def reply_headers(metadata: Sequence[tuple[str, str | bytes]]) -> HeaderTuple:
    return (*REPLY_BEGIN, *[(key, coded(value)) for key, value in metadata])


def status_trailers(code: int, details: str, metadata: Sequence[tuple[str, str | bytes]]) -> HeaderTuple:
    """The end of a call."""
    message = (("grpc-message", quote(details, MESSAGE_SAFE, errors="replace")),) if details else ()
    return (("grpc-status", str(code)), *message, *[(key, coded(value)) for key, value in metadata])


def trailers_only(trailers: HeaderTuple) -> HeaderTuple:
    """A reply that has nothing before its end."""
    return ((":status", "200"), CONTENT_TYPE, *trailers)


def only_message(body: bytes | bytearray) -> bytes | None:
    """The message of a body that has arrived whole; None where it has not exactly one that is not compressed."""
    if len(body) < MESSAGE_HEAD or body[0] or int.from_bytes(body[1:MESSAGE_HEAD], "big") != len(body) - MESSAGE_HEAD:
        return None
    return bytes(body[MESSAGE_HEAD:])
