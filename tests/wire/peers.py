"""The server's side of an HTTP/2 connection in memory: it writes frames, and reads those of the client."""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from hpack import Decoder, Encoder

from appliance.wire.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    ClientConnection,
    frame,
)


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class Peer:
    """A server that sees what ``client`` sends as ``frames``, and whose methods make its own bytes."""

    def __init__(self, client: ClientConnection) -> None:
        self.client = client
        self.encoder, self.decoder = Encoder(), Decoder()
        self.frames: list[Frame] = []
        self.unread = b""
        self.greeted = False

    def read(self) -> list[Frame]:
        """The frames that the client has sent since the last look."""
        while data := self.client.data_to_send():
            self.unread += data
        if not self.greeted:
            assert self.unread.startswith(PREFACE)
            self.unread, self.greeted = self.unread[len(PREFACE) :], True
        found = []
        while self.unread:
            end = 9 + int.from_bytes(self.unread[:3], "big")
            head, payload, self.unread = self.unread[:9], self.unread[9:end], self.unread[end:]
            found.append(Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload))
        self.frames += found
        return found

    def body(self, stream: int = 1) -> bytes:
        """What the client has sent on a stream so far."""
        self.read()
        return b"".join(each.payload for each in self.frames if (each.kind, each.stream) == (DATA, stream))

    def sent_all(self, stream: int = 1) -> bool:
        self.read()
        return any((each.kind, each.stream) == (DATA, stream) and each.flags & END_STREAM for each in self.frames)

    def headers(self) -> list[tuple[str, str]]:
        """The header block of the client's last stream."""
        last = max(at for at, each in enumerate(self.frames) if each.kind == HEADERS)
        block = b"".join(each.payload for each in self.frames[last:] if each.kind in (HEADERS, CONTINUATION))
        return [(str(key), str(value)) for key, value in self.decoder.decode(block)]

    def settings(self, *pairs: tuple[int, int]) -> bytes:
        return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))

    def grant(self, stream: int, size: int) -> bytes:
        return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))

    def block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        return self.encoder.encode(headers)

    def reply(self, stream: int, *headers: tuple[str, str]) -> bytes:
        return frame(HEADERS, END_HEADERS, stream, self.block([(":status", "200"), *headers]))

    def data(self, stream: int, data: bytes, end: bool = False) -> bytes:
        return frame(DATA, END_STREAM if end else 0, stream, data)

    def end(self, stream: int, *headers: tuple[str, str]) -> bytes:
        return frame(HEADERS, END_HEADERS | END_STREAM, stream, self.block(headers or [("grpc-status", "0")]))
