"""A replica that waits before it answers, as one waits for a GPU, for scripts/bench_hybrid.py: without a core.

It answers every call of TEI's with the one reply that it has. A server of grpcio takes a millisecond of a core for a
call, and three at once would take the cores from what is measured. This one only writes bytes that it has ready.

python scripts/bench_waiting.py PORT SECONDS OUTPUT, which is dense, splade or colbert
"""

import socket
import struct
import sys
import threading
import time

from hpack import Encoder, NeverIndexedHeaderTuple

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

REPLIES = {
    "dense": tei.EmbedResponse(embeddings=[0.05] * 384),
    "splade": tei.EmbedSparseResponse(sparse_embeddings=[tei.SparseValue(index=at, value=0.5) for at in range(100)]),
    "colbert": tei.EmbedAllResponse(token_embeddings=[tei.TokenEmbedding(embeddings=[0.1] * 128) for _ in range(12)]),
}


def block(*headers: tuple[str, str]) -> bytes:
    """The same bytes in every reply, as no table keeps them."""
    return bytes(Encoder().encode([NeverIndexedHeaderTuple(*each) for each in headers], huffman=False))


NO_TABLE = b"\x20"  # before the first block, as the client allows none (RFC 7541, 6.3)
BEGUN, DONE = block((":status", "200"), ("content-type", "application/grpc")), block(("grpc-status", "0"))


def answer_all(connection: socket.socket, wait_secs: float, body: bytes) -> None:
    """The calls of one connection, one after the other."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    window = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)  # for all requests that ever come
    connection.sendall(frame(SETTINGS, 0, 0, b"") + frame(WINDOW_UPDATE, 0, 0, window))
    unread, at, begun = b"", len(PREFACE), NO_TABLE + BEGUN
    while data := connection.recv(65536):
        unread += data
        while len(unread) >= at + FRAME_HEAD:
            kind, flags = unread[at + 3], unread[at + 4]
            stream = int.from_bytes(unread[at + 5 : at + FRAME_HEAD], "big")
            end = at + FRAME_HEAD + int.from_bytes(unread[at : at + 3], "big")
            if len(unread) < end:
                break
            if kind in (SETTINGS, PING) and not flags & ACK:
                content = unread[at + FRAME_HEAD : end] if kind == PING else b""
                connection.sendall(frame(kind, ACK, 0, content))
            if kind in (HEADERS, DATA) and flags & END_STREAM:
                time.sleep(wait_secs)
                reply = frame(HEADERS, END_HEADERS, stream, begun) + frame(DATA, 0, stream, body)
                connection.sendall(reply + frame(HEADERS, END_HEADERS | END_STREAM, stream, DONE))
                begun = BEGUN
            unread, at = unread[end:], 0


def serve(port: int, wait_secs: float, output: str) -> None:
    body = framed([REPLIES[output].SerializeToString()])
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer_all, args=(connection, wait_secs, body), daemon=True).start()


serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
