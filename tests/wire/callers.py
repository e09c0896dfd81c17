"""The client's side of an HTTP/2 connection in memory: it writes frames, also wrong ones, and reads the server's."""

import struct
from collections import defaultdict
from collections.abc import Iterable

from hpack import Decoder, Encoder

from appliance.wire.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from appliance.wire.http2_headers import HeaderTuple
from appliance.wire.http2_server import ServerConnection, ServerEvent
from tests.wire.peers import Frame

REQUEST: HeaderTuple = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/tei.v1.Embed/Embed"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class RawCaller:
    """A client of ``server`` that sees what it sends: `frames` in order, and of each stream `blocks` and `bodies`.

    ended: the streams that the server has ended. resets: the errors of those that it has reset.
    """

    def __init__(self, *settings: tuple[int, int]) -> None:
        self.server = ServerConnection()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.frames: list[Frame] = []
        self.blocks: dict[int, list[HeaderTuple]] = defaultdict(list)
        self.bodies: dict[int, bytes] = defaultdict(bytes)
        self.ended: list[int] = []
        self.resets: dict[int, int] = {}
        self.goaways: list[tuple[int, int]] = []  # (last stream, error)
        self.block = b""
        assert self.say(PREFACE, self.settings(*settings)) == []
        self.read()

    def say(self, *raw: bytes) -> list[ServerEvent]:
        return self.server.receive(b"".join(raw))

    def read(self) -> list[Frame]:
        """The frames that the server has sent since the last look."""
        found = []
        while data := self.server.data_to_send():
            found += self.cut(data)
        return found

    def cut(self, data: bytes | bytearray) -> list[Frame]:
        """The frames of what the server has sent at once, which are whole."""
        unread, found = bytes(data), []
        while unread:
            end = 9 + int.from_bytes(unread[:3], "big")
            head, payload, unread = unread[:9], unread[9:end], unread[end:]
            assert len(payload) == end - 9
            found.append(Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload))
            self.take(found[-1])
        self.frames += found
        return found

    def take(self, each: Frame) -> None:
        if each.kind in (DATA, HEADERS) and each.flags & END_STREAM:
            self.ended.append(each.stream)
        if each.kind == DATA:
            self.bodies[each.stream] += each.payload
        elif each.kind in (HEADERS, CONTINUATION):
            self.block += each.payload
            if each.flags & END_HEADERS:
                fields = self.decoder.decode(self.block)
                self.blocks[each.stream].append(tuple((str(key), str(value)) for key, value in fields))
                self.block = b""
        elif each.kind == RST_STREAM:
            self.resets[each.stream] = int.from_bytes(each.payload, "big")
        elif each.kind == GOAWAY:
            last, error = struct.unpack(">II", each.payload[:8])  # and why, in words
            self.goaways.append((last, error))

    def granted(self, stream: int) -> int:
        """By how much the server has opened a window so far."""
        self.read()
        grants = [each.payload for each in self.frames if (each.kind, each.stream) == (WINDOW_UPDATE, stream)]
        return sum(int.from_bytes(each, "big") for each in grants)

    def settings(self, *pairs: tuple[int, int]) -> bytes:
        return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))

    def grant(self, stream: int, size: int) -> bytes:
        return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))

    def reset(self, stream: int, error: int = 8) -> bytes:
        return frame(RST_STREAM, 0, stream, struct.pack(">I", error))

    def block_of(self, headers: Iterable[tuple[str, str]]) -> bytes:
        return bytes(self.encoder.encode(headers))

    def open(self, stream: int, headers: Iterable[tuple[str, str]] = REQUEST, end: bool = False) -> bytes:
        return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, self.block_of(headers))

    def data(self, stream: int, data: bytes, end: bool = False) -> bytes:
        return frame(DATA, END_STREAM if end else 0, stream, data)


def calling(*streams: int, settings: Iterable[tuple[int, int]] = ()) -> RawCaller:
    """A caller who has sent the whole requests of these streams, which wait for their replies."""
    caller = RawCaller(*settings)
    caller.say(*[caller.open(stream, end=True) for stream in streams])
    caller.read()
    return caller
