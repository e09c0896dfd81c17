"""A replica that waits before it answers, as one waits for a GPU, for scripts/bench_hybrid.py: without a core.

It has three of TEI's calls, with one reply each. A server of grpcio takes a millisecond of a core for such a call, and
three at once would take the cores from what is measured. This one writes bytes that it has ready.

python scripts/bench_waiting.py PORT SECONDS
"""

import socket
import struct
import sys
import threading
import time
from io import BufferedRWPair

from hpack import Decoder, Encoder

from appliance.wire.calls import framed
from appliance.wire.http2 import (
    ACK,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    HEADERS,
    LARGEST_WINDOW,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from appliance.wire.tei.v1 import tei_pb2 as tei

DENSE = tei.EmbedResponse(embeddings=[0.05] * 384)
SPARSE = tei.EmbedSparseResponse(sparse_embeddings=[tei.SparseValue(index=index, value=0.5) for index in range(100)])
TOKENS = tei.EmbedAllResponse(token_embeddings=[tei.TokenEmbedding(embeddings=[0.1] * 128) for _ in range(12)])
BODIES = {
    f"/tei.v1.Embed/{name}": framed([reply.SerializeToString()])
    for name, reply in (("Embed", DENSE), ("EmbedSparse", SPARSE), ("EmbedAll", TOKENS))
}
BEGUN = [(":status", "200"), ("content-type", "application/grpc")]
DONE, UNIMPLEMENTED = [("grpc-status", "0")], [("grpc-status", "12")]


class Replies:
    """The replies on one connection."""

    def __init__(self, connection: socket.socket, wait_secs: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.wait_secs = connection, wait_secs
        self.file: BufferedRWPair = connection.makefile("rwb")
        self.encoder, self.decoder = Encoder(), Decoder()
        self.encoder.header_table_size = 0  # as its client wants it
        self.path = ""

    def run(self) -> None:
        self.file.read(len(PREFACE))
        window = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)  # of all requests that ever come
        self.connection.sendall(frame(SETTINGS, 0, 0, b"") + frame(WINDOW_UPDATE, 0, 0, window))
        while len(head := self.file.read(FRAME_HEAD)) == FRAME_HEAD:
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            payload = self.file.read(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == HEADERS:
                self.path = {str(key): str(value) for key, value in self.decoder.decode(payload)}[":path"]
            if kind in (HEADERS, DATA) and flags & END_STREAM:
                self.answer(stream)

    def answer(self, stream: int) -> None:
        body = BODIES.get(self.path)
        if body is None:
            refusal = self.encoder.encode([*BEGUN, *UNIMPLEMENTED])
            self.connection.sendall(frame(HEADERS, END_HEADERS | END_STREAM, stream, refusal))
            return
        begun = frame(HEADERS, END_HEADERS, stream, self.encoder.encode(BEGUN))
        done = frame(HEADERS, END_HEADERS | END_STREAM, stream, self.encoder.encode(DONE))
        time.sleep(self.wait_secs)
        self.connection.sendall(begun + frame(DATA, 0, stream, body) + done)


def serve(port: int, wait_secs: float) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=Replies(connection, wait_secs).run, daemon=True).start()


serve(int(sys.argv[1]), float(sys.argv[2]))
