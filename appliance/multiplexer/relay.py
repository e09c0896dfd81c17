"""The relay shapes: who shall answer is read, the inner bytes go to a replica, the reply's bytes come back.

What is left of the caller's deadline goes along, a cancelled call is cancelled at the replica, and the replica's own
errors come back unchanged: code, message and metadata. Calls wait in the queue of their instance while its replicas are
full. `attempts` and `streams` have what follows when a replica fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import grpc

from appliance.core.problems import Kind, Problem
from appliance.drivers.grpccalls import refuse
from appliance.drivers.memory import Reserve
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.attempts import Attempts
from appliance.multiplexer.cached_calls import CachedCalls
from appliance.multiplexer.cached_streams import CachedStreams
from appliance.multiplexer.embedding_cache import EmbeddingCache
from appliance.multiplexer.metering import Metering
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.streams import Streams
from appliance.wire.envelope import CODE_KEY, EXPRESS_JUDGE, EXPRESS_KEY, EXPRESS_SECS_KEY
from appliance.wire.methods import Method, Shape

JUDGED = (EXPRESS_KEY, EXPRESS_JUDGE)
EXPRESS_SECS = 5  # so long a key that was revoked may still pass the express lane


class Relay:
    """Handlers for the rows of `wire.methods`. timeout_secs 0: only the caller's deadline counts."""

    def __init__(
        self,
        pool: ReplicaPool,
        metering: Metering,
        timeout_secs: float,
        most_streams: int,
        reserve: Reserve,
        cache: EmbeddingCache,
    ) -> None:
        self.metering = metering
        self.reserve = reserve
        self.pool = pool
        self.attempts = Attempts(pool, metering, timeout_secs)
        self.streams = Streams(self.attempts, timeout_secs)
        self.cached = CachedCalls(self.attempts, cache)
        self.cached_streams = CachedStreams(self.streams, cache)
        self.stream_permits = threading.BoundedSemaphore(most_streams)
        self.most_streams = most_streams

    def handler(self, method: Method, addressing: Addressing) -> grpc.RpcMethodHandler:
        """The gRPC handler of one row; bytes in, bytes out."""
        if method.shape is Shape.UNARY:

            def unary(raw: bytes, context: grpc.ServicerContext) -> bytes:
                with self.metering.counting(method.name, context) as call, RefusalsAsStatus(context):
                    call.target, inner = addressing.first(method, raw, context)
                    reply = self.cached.unary(method, call.target, inner, context, call)
                    call.texts = 1
                    if JUDGED in context.invocation_metadata():
                        reply.headers.append((EXPRESS_SECS_KEY, str(EXPRESS_SECS)))
                    context.send_initial_metadata(reply.headers)
                    if reply.trailers:
                        context.set_trailing_metadata(reply.trailers)
                    return reply.message

            return grpc.unary_unary_rpc_method_handler(unary)

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            counted, reservation = self.metering.counting(method.name, context), self.reserve.reservation()
            with counted as call, RefusalsAsStatus(context), self.stream_permit(), reservation:
                yield from self.cached_streams.replies(method, addressing, requests, context, reservation, call)

        return grpc.stream_stream_rpc_method_handler(stream)

    @contextmanager
    def stream_permit(self) -> Iterator[None]:
        """One of grpc_max_parallel_streams places."""
        if not self.stream_permits.acquire(blocking=False):
            raise Problem(
                Kind.EXHAUSTED,
                "TOO_MANY_STREAMS",
                f"{self.most_streams} streams are open already: close some or raise grpc_max_parallel_streams",
            )
        try:
            yield
        finally:
            self.stream_permits.release()


class RefusalsAsStatus:
    """A block whose Problem ends the call, with its code and words."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, problem: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(problem, Problem):
            refuse(self.context, problem, (CODE_KEY, problem.code))
