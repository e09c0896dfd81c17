"""A TEI that does as it is told: a gRPC server that takes any tei.v1 method and obeys the JSON in the request bytes.

Orders (keys of the JSON object): `sleep` seconds before the answer, `hang` until the call ends, `fail` with
[code, details, trailing metadata], `size` of the reply in bytes. Anything else is answered with `reply_to(request)`.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from appliance.wire.tei.v1 import tei_pb2 as tei

STREAM_STREAM = {
    "Embed/EmbedStream",
    "Embed/EmbedSparseStream",
    "Embed/EmbedAllStream",
    "Predict/PredictStream",
    "Predict/PredictPairStream",
    "Tokenize/TokenizeStream",
    "Tokenize/DecodeStream",
}


def reply_to(request: bytes) -> bytes:
    return b"reply to " + request


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
    """Listens on ``port`` between `start` and `stop`; every call is kept in ``calls``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.calls: list[Call] = []
        self.server: grpc.Server | None = None

    def start(self) -> None:
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        options = [*unlimited, ("grpc.so_reuseport", 0)]
        self.server = grpc.server(ThreadPoolExecutor(64), handlers=[self], options=options)
        assert self.server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        self.server.start()

    def stop(self) -> None:
        if self.server:
            self.server.stop(0).wait()
            self.server = None

    def service(self, details: Any) -> grpc.RpcMethodHandler:
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
            texts = tei.RerankRequest.FromString(request).texts
        except DecodeError:
            texts = []
        if not texts:
            return next(self.stream(path, iter([request]), context))
        replies = self.stream(path, (text.encode() for text in texts), context)
        ranks = [tei.Rank(index=at, text=reply.decode(), score=-at) for at, reply in enumerate(replies)]
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
            return b"x" * int(order["size"])
        return reply_to(request)
