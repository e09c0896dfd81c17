"""`tei.v1` over gRPC: unary calls and streams in front of `Answers`.

As in TEI, each text needs a permit: a unary call without one is refused at once, a stream or Rerank waits for it. A
stream answers in the order of its requests, and ends with the first error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from appliance.core.problems import Problem, invalid
from appliance.drivers.grpccalls import refuse
from appliance.engine.answers import Answers, Pending
from appliance.engine.feeder import Begin, Feeder, cancel
from appliance.engine.intake import JointLane, Lane, Permits
from appliance.wire import packing
from appliance.wire.envelope import LANE_KEY, SINGLE_LANE
from appliance.wire.methods import HYBRID, IMAGES
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.engine_pb2 import EmbedHybridRequest
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from appliance.wire.tei_appliance.v1.packed_pb2 import Packed

STREAM_DEPTH = 1024  # requests of one stream in work; TEI's GRPC_MAX_PARALLEL_STREAM_REQUESTS


def parsed(message: type, raw: bytes) -> Any:
    try:
        return message.FromString(raw)  # type: ignore[attr-defined]
    except DecodeError:
        raise invalid(f"The request is not a {message.__name__} of tei.v1") from None


def end_cancelled(context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.CANCELLED, "The caller is gone")
    raise AssertionError  # not reached: abort raises, which grpc's types do not say


class Service:
    """The handlers of one engine. info: its fixed answer to Info."""

    def __init__(self, answers: Answers, info: tei.InfoResponse) -> None:
        self.answers = answers
        self.permits: Permits = answers.model.permits
        self.metrics = answers.model.metrics
        self.info = info
        self.compute_type = "cpu" if answers.model.runtime.on_cpu else "gpu"

    def handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """service name -> method name -> handler, as `grpcserver.Server.add` takes them."""
        answers = self.answers
        return {
            "tei.v1.Info": {"Info": grpc.unary_unary_rpc_method_handler(self.answer_info)},
            "tei.v1.Embed": {
                **self.queued("Embed", tei.EmbedRequest, answers.embed),
                **self.queued("EmbedSparse", tei.EmbedSparseRequest, answers.embed_sparse),
                **self.queued("EmbedAll", tei.EmbedAllRequest, answers.embed_all),
            },
            packing.SERVICE: {
                "Embed": self.packed_unary(tei.EmbedRequest, answers.embed),
                "EmbedSparse": self.packed_unary(tei.EmbedSparseRequest, answers.embed_sparse),
                "EmbedStream": self.packed(tei.EmbedRequest, answers.embed),
                "EmbedSparseStream": self.packed(tei.EmbedSparseRequest, answers.embed_sparse),
            },
            IMAGES[0].service_name: self.queued("EmbedImage", EmbedImageRequest, answers.embed_image),
            HYBRID.service_name: {"EmbedHybrid": self.unary(EmbedHybridRequest, answers.embed_hybrid)},
            "tei.v1.Predict": {
                **self.queued("Predict", tei.PredictRequest, answers.predict),
                **self.queued("PredictPair", tei.PredictPairRequest, answers.predict_pair),
            },
            "tei.v1.Rerank": {
                "Rerank": grpc.unary_unary_rpc_method_handler(self.rerank),
                "RerankStream": grpc.stream_unary_rpc_method_handler(self.rerank_stream),
            },
            "tei.v1.Tokenize": {
                **self.direct("Tokenize", tei.EncodeRequest, answers.tokenize),
                **self.direct("Decode", tei.DecodeRequest, answers.decode),
            },
        }

    def answer_info(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        return self.info.SerializeToString()

    # -- texts that go through the queue ------------------------------------------------------------------------------

    def unary(self, message: type, begin: Begin) -> grpc.RpcMethodHandler:
        def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
            with self.counted("single", context):
                lane = Lane(self.permits, single=True)
                return self.finished(begin(parsed(message, raw), lane), context, "single")

        return grpc.unary_unary_rpc_method_handler(handle)

    def queued(self, name: str, message: type, begin: Begin) -> dict[str, grpc.RpcMethodHandler]:
        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self.stream(begin, message, ((raw,) for raw in requests), context, lambda replies: replies[0])

        return {
            name: self.unary(message, begin),
            f"{name}Stream": grpc.stream_stream_rpc_method_handler(stream),
        }

    def packed(self, message: type, begin: Begin) -> grpc.RpcMethodHandler:
        """A stream of `Packed` messages."""

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            def unpacked() -> Iterator[Sequence[bytes]]:
                for raw in requests:
                    yield parsed(Packed, raw).messages

            return self.stream(begin, message, unpacked(), context, packing.pack)

        return grpc.stream_stream_rpc_method_handler(stream)

    def packed_unary(self, message: type, begin: Begin) -> grpc.RpcMethodHandler:
        """One `Packed` message, without the threads of a stream: all of its texts, or the first failure."""

        def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
            single = (LANE_KEY, SINGLE_LANE) in context.invocation_metadata()
            together = JointLane(self.permits, lambda: not context.is_active(), single, whole=True)
            begun: list[Pending] = []
            try:
                for each in parsed(Packed, raw).messages:
                    begun.append(begin(parsed(message, each), together))
                together.flush()
                if not context.add_callback(lambda: cancel(begun)):
                    cancel(begun)
                return packing.pack([self.reply(pending) for pending in begun])
            except Problem as problem:
                refuse(context, problem, is_final=False)
            except CancelledError:
                end_cancelled(context)
            finally:
                cancel(begun)  # what has no reply

        return grpc.unary_unary_rpc_method_handler(handle)

    @contextmanager
    def counted(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Count a call, and end it with the status of its failure."""
        self.metrics.requests.labels(method).inc()
        try:
            yield
        except Problem as problem:
            self.metrics.failed(problem)
            refuse(context, problem, is_final=False)
        except CancelledError:
            end_cancelled(context)

    def finished(self, pending: Pending, context: grpc.ServicerContext, method: str) -> bytes:
        """The reply of a call. The initial metadata get its times in milliseconds."""
        if not context.add_callback(pending.cancel):
            pending.cancel()
        reply = self.reply(pending)
        self.metrics.request_done(method, pending.took)
        context.send_initial_metadata(compute_headers(pending.times, self.compute_type))
        return reply

    def reply(self, pending: Pending) -> bytes:
        self.metrics.counts[pending.kind].inc(sum(job.encoding is not None for job in pending.jobs))
        reply = pending.reply()
        for _ in pending.jobs:
            self.metrics.input_done(pending.kind, pending.took)
        return reply

    def stream(
        self,
        begin: Begin,
        message: type,
        requests: Iterator[Sequence[bytes]],
        context: grpc.ServicerContext,
        joined: Callable[[list[bytes]], bytes],
    ) -> Iterator[bytes]:
        """requests: those of one message each; joined: the message of the replies to these."""
        waiting: queue.Queue[Sequence[Pending] | Problem | None] = queue.Queue(STREAM_DEPTH)
        single = (LANE_KEY, SINGLE_LANE) in context.invocation_metadata()
        feeder = Feeder(lambda raw, lane: begin(parsed(message, raw), lane), requests, waiting, self.permits, single)
        if not context.add_callback(feeder.close):
            feeder.close()
        threading.Thread(target=feeder.feed, name="stream", daemon=True).start()
        try:
            while (entry := waiting.get()) is not None:
                if isinstance(entry, Problem):
                    raise entry
                feeder.taken = entry
                replies: list[bytes] = []
                try:
                    for pending in entry:
                        replies.append(self.reply(pending))
                except Problem:
                    for pending in entry:
                        pending.cancel()
                    if replies:
                        yield joined(replies)
                    raise
                yield joined(replies)
        except Problem as problem:
            self.metrics.failed(problem)
            refuse(context, problem, is_final=False)
        except CancelledError:
            end_cancelled(context)
        finally:
            feeder.close()

    # -- rerank -------------------------------------------------------------------------------------------------------

    def rerank(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        with self.counted("batch", context):
            request = parsed(tei.RerankRequest, raw)
            return self.scored(lambda lane: self.answers.rerank(request, lane), context)

    def rerank_stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Each message has the same query and one text; all texts are ranked together. TEI (1.9) never answers."""
        with self.counted("batch", context):
            messages = [parsed(tei.RerankStreamRequest, raw) for raw in requests]
            if not messages:
                raise invalid("`texts` cannot be empty: the stream had no message")
            first = messages[0]
            if any(message.query != first.query for message in messages):
                raise invalid("All messages of a RerankStream must have the same query")
            self.answers.require("reranker", "multivector", does="rerank")
            texts = [message.text for message in messages]
            return self.scored(lambda lane: self.answers.ranked(first.query, texts, first, lane), context)

    def scored(self, begin: Callable[[Lane], Pending], context: grpc.ServicerContext) -> bytes:
        together = JointLane(self.permits, gone=lambda: not context.is_active(), whole=True)
        pending = begin(together)
        try:
            together.flush()
        except Problem:
            pending.cancel()
            raise
        return self.finished(pending, context, "batch")

    # -- the tokenizer ------------------------------------------------------------------------------------------------

    def direct(self, name: str, message: type, answer: Callable[[Any], Any]) -> dict[str, grpc.RpcMethodHandler]:
        """Handlers of a call that needs neither the queue nor a permit."""

        def unary(raw: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                reply: bytes = answer(parsed(message, raw)).SerializeToString()
                return reply
            except Problem as problem:
                refuse(context, problem, is_final=False)

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for raw in requests:
                yield unary(raw, context)

        return {
            name: grpc.unary_unary_rpc_method_handler(unary),
            f"{name}Stream": grpc.stream_stream_rpc_method_handler(stream),
        }


def compute_headers(times: tei.Metadata, compute_type: str) -> tuple[tuple[str, str], ...]:
    """TEI's x-compute-* metadata of a unary reply: counts, and milliseconds."""
    total = str(times.total_time_ns // 1_000_000)
    return (
        ("x-compute-type", compute_type),
        ("x-compute-time", total),
        ("x-compute-characters", str(times.compute_chars)),
        ("x-compute-tokens", str(times.compute_tokens)),
        ("x-total-time", total),
        ("x-tokenization-time", str(times.tokenization_time_ns // 1_000_000)),
        ("x-queue-time", str(times.queue_time_ns // 1_000_000)),
        ("x-inference-time", str(times.inference_time_ns // 1_000_000)),
    )
