"""A client of HTTP/2 that says less than it announced: half of a message, or nothing more, for as long as it likes."""

import select
import socket
import struct

from hpack import Decoder, Encoder

from appliance.wire.http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, WINDOW_UPDATE, frame

RST_STREAM, INITIAL_WINDOW = 3, 4


class HalfSender:
    """One connection with one call of one message. ``trailers`` is how the server ended it.

    keep_back: bytes of the message that it announces and never sends; window: how much of an answer it takes.
    """

    def __init__(
        self, port: int, path: str, message: bytes, keep_back: int = 0, key: str | None = None, window: int = 65535
    ) -> None:
        self.message = struct.pack(">BI", 0, len(message)) + message[: len(message) - keep_back]
        self.is_whole = not keep_back
        self.socket = socket.create_connection(("127.0.0.1", port))
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "test"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        if key:
            headers.append(("authorization", f"Bearer {key}"))
        opening = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, window))
        self.socket.sendall(PREFACE + opening + frame(HEADERS, END_HEADERS, 1, Encoder().encode(headers)))
        self.windows = {0: 65535, 1: 65535}
        self.first_window = 65535
        self.incoming = b""
        self.decoder = Decoder()
        self.trailers: dict[str, str] = {}
        self.ended = False
        self.sent = 0

    def go_on(self) -> None:
        """Read what has come, and send what may be sent."""
        while select.select([self.socket], [], [], 0)[0]:
            piece = self.socket.recv(1 << 20)
            if not piece:
                self.ended = True
                return
            self.incoming += piece
            self.take_frames()
        while not self.ended and (size := min(16384, len(self.message) - self.sent, *self.windows.values())) > 0:
            whole = self.is_whole and self.sent + size == len(self.message)
            self.socket.sendall(frame(DATA, END_STREAM * whole, 1, self.message[self.sent : self.sent + size]))
            self.sent += size
            self.windows = {stream: window - size for stream, window in self.windows.items()}

    def take_frames(self) -> None:
        while len(self.incoming) >= 9 + (size := int.from_bytes(self.incoming[:3])):
            kind, flags, stream = self.incoming[3], self.incoming[4], int.from_bytes(self.incoming[5:9])
            payload, self.incoming = self.incoming[9 : 9 + size], self.incoming[9 + size :]
            if kind == WINDOW_UPDATE:
                self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload)
            elif kind == SETTINGS and not flags & ACK:
                self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
                for at in range(0, size, 6):
                    name, value = struct.unpack(">HI", payload[at : at + 6])
                    if name == INITIAL_WINDOW:
                        self.windows[1] += value - self.first_window
                        self.first_window = value
            elif kind == HEADERS:
                self.trailers |= {str(name): str(value) for name, value in self.decoder.decode(payload)}
            self.ended = self.ended or kind == RST_STREAM or bool(kind == HEADERS and flags & END_STREAM)

    def close(self) -> None:
        self.socket.close()
