"""A TEI that does as it is told: a gRPC server that takes any tei.v1 method and obeys the JSON in the request bytes.

Orders (keys of the JSON object): `begin` the answer with its headers, `sleep` seconds before the answer, `hang` until
the call ends, `fail` with [code, details, trailing metadata], `size` of the reply in bytes. Anything else is answered
with `reply_to(request)`.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from appliance.core.program import MARKER, marker
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.vectors import length_delimited
from testing.doors import DOOR

STREAM_STREAM = {
    "Embed/EmbedStream",
    "Embed/EmbedSparseStream",
    "Embed/EmbedAllStream",
    "Predict/PredictStream",
    "Predict/PredictPairStream",
    "Tokenize/TokenizeStream",
    "Tokenize/DecodeStream",
}


# A vector of one number near 1, whose bytes are also a message with a field that nobody has: a reply of any method.
ANY_REPLY = b"\x0a\x04\x10\x80\x80\x3f"


def reply_to(request: bytes) -> bytes:
    return ANY_REPLY + length_delimited(1007, b"reply to " + request)


@dataclass
class Call:
    """What one call brought, and when it ended (monotonic seconds)."""

    path: str
    began: float
    time_remaining: float | None
    metadata: dict[str, str | bytes]
    requests: list[bytes] = field(default_factory=list)
    ended: float | None = None


class FakeTei(grpc.GenericRpcHandler):
    """Listens on ``port`` between `start` and `stop`, as a replica of an instance; every call is kept in ``calls``.

    node: the id of the appliance whose replica it is.
    """

    def __init__(self, port: int, node: str, name: str, replica: int = 0) -> None:
        self.port = port
        self.node, self.name, self.replica = node, name, replica
        self.calls: list[Call] = []
        self.unknown: list[str] = []  # methods that TEI does not have
        self.server: grpc.Server | None = None
        self.door: subprocess.Popen[str] | None = None

    def start(self, launch: int = 1) -> None:
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        self.server = grpc.server(ThreadPoolExecutor(64), handlers=[self], options=unlimited)
        inside = f"{tempfile.mkdtemp()}/tei.sock"
        assert self.server.add_insecure_port(f"unix:{inside}")
        self.server.start()
        self.open(inside, marker(self.node, self.name, self.replica, launch))

    def open(self, inside: str, mark: str) -> None:
        command = [sys.executable, "-S", "-c", DOOR, str(self.port), inside]
        environ = {**os.environ, MARKER: mark}
        self.door = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self.door.stdout
        assert [self.door.stdout.readline() for _ in range(2)] == ["tries\n", "open\n"]

    def stop(self) -> None:
        if self.door and self.door.stdout:
            self.door.kill()
            self.door.wait()
            self.door.stdout.close()
            self.door = None
        if self.server:
            self.server.stop(0).wait()
            self.server = None

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        if details.method.startswith("/tei_appliance."):
            self.unknown.append(details.method)
            return None  # which is UNIMPLEMENTED, as of TEI
        name = details.method.removeprefix("/tei.v1.")
        if name in STREAM_STREAM:
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self.stream(details.method, requests, context)
            )
        if name == "Rerank/Rerank":
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: self.rerank(details.method, request, context)
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(self.stream(details.method, iter([request]), context))
        )

    def rerank(self, path: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Obeys each text, and ranks the replies in order; a request without texts is obeyed as a whole."""
        try:
            texts = list(tei.RerankRequest.FromString(request).texts)
        except DecodeError:
            texts = []
        if not texts:
            return next(self.stream(path, iter([request]), context))
        replies = self.stream(path, (text.encode() for text in texts), context)
        ranks = [tei.Rank(index=at, text=texts[at], score=-at) for at, _ in enumerate(replies)]
        return tei.RerankResponse(ranks=ranks).SerializeToString()

    def stream(self, path: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata())
        call = Call(path, time.monotonic(), context.time_remaining(), metadata)
        self.calls.append(call)
        ended = threading.Event()

        def end() -> None:
            call.ended = time.monotonic()
            ended.set()

        context.add_callback(end)
        for request in requests:
            call.requests.append(request)
            yield self.obey(request, context, ended)

    def obey(self, request: bytes, context: grpc.ServicerContext, ended: threading.Event) -> bytes:
        try:
            order = json.loads(request)
        except ValueError:
            return reply_to(request)
        if not isinstance(order, dict):
            return reply_to(request)
        if order.get("begin"):
            context.send_initial_metadata(())
        if order.get("sleep"):
            ended.wait(order["sleep"])
        if order.get("hang"):
            ended.wait(60)
        if "fail" in order:
            code, details, trailing = order["fail"]
            context.set_trailing_metadata(
                [(key, value.encode() if key.endswith("-bin") else value) for key, value in trailing]
            )
            context.abort(getattr(grpc.StatusCode, code), details)
        if "size" in order:
            return ANY_REPLY + length_delimited(1007, b"x" * int(order["size"]))
        return reply_to(request)
