"""The three relay shapes: a request's target is read, its inner bytes go to a replica, the reply's bytes come back.

What is left of the caller's deadline goes along, a cancelled call is cancelled at the replica, and the replica's own
errors come back unchanged: code, message and metadata. A stream's first message decides where all of it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.routing import Target
from appliance.drivers.grpcserver import refuse
from appliance.drivers.tei import Backend
from appliance.multiplexer.fleet import Fleet
from appliance.multiplexer.progress import Progress, Watchdog
from appliance.wire.envelope import INSTANCE_KEY, MODEL_KEY, unwrap
from appliance.wire.methods import Method, Shape

# Ours to read, or the transport's to set: everything else of the caller's metadata goes along.
OWN_METADATA = {INSTANCE_KEY, MODEL_KEY, "authorization", "user-agent", "content-type", "te"}
LONGEST_WAIT_SECS = 10**7  # grpc reports "no deadline" as some centuries


class Relay:
    """Handlers for the rows of `wire.methods`. timeout_secs 0: only the caller's deadline counts."""

    def __init__(self, fleet: Fleet, timeout_secs: float, parallel_streams: int) -> None:
        self.fleet = fleet
        self.timeout_secs = timeout_secs
        self.watchdog = Watchdog(timeout_secs)
        self.streams = threading.BoundedSemaphore(parallel_streams)
        self.parallel_streams = parallel_streams

    def handler(self, method: Method) -> grpc.RpcMethodHandler:
        """The gRPC handler of one row; bytes in, bytes out."""
        if method.shape is Shape.UNARY:
            return grpc.unary_unary_rpc_method_handler(self.guarded(method, self.unary))
        if method.shape is Shape.STREAM:
            return grpc.stream_stream_rpc_method_handler(self.guarded_stream(method, self.stream))
        return grpc.stream_unary_rpc_method_handler(self.guarded(method, self.gather))

    def guarded(self, method: Method, relay: Callable[..., bytes]) -> Callable[..., bytes]:
        def handle(given: Any, context: grpc.ServicerContext) -> bytes:
            try:
                return relay(method, given, context)
            except Problem as problem:
                refuse(context, problem)

        return handle

    def guarded_stream(self, method: Method, relay: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def handle(given: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                yield from relay(method, given, context)
            except Problem as problem:
                refuse(context, problem)

        return handle

    def unary(self, method: Method, raw: bytes, context: grpc.ServicerContext) -> bytes:
        target, inner = opened(method, raw)
        backend = self.fleet.pick(target)
        with backend.holding(1):
            call = backend.method(method.path).future(inner, timeout=self.left(context), metadata=along(context))
            follow_cancel(context, call)
            try:
                reply: bytes = call.result()
            except (grpc.RpcError, grpc.FutureCancelledError):
                pass_on(context, backend, call)
        pass_metadata(context, call)
        return reply

    def stream(self, method: Method, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self.stream_place():
            feed = Feed(method, requests)
            backend = self.fleet.pick(feed.target)
            with backend.holding(1):
                call = self.open_stream(method, backend, feed, context, many_replies=True)
                with self.watchdog.over(feed.progress):
                    try:
                        for reply in call:
                            feed.progress.received()
                            yield reply
                    except (grpc.RpcError, grpc.FutureCancelledError):
                        feed.explain(self.timeout_secs)
                        pass_on(context, backend, call)
                if trailing := call.trailing_metadata():
                    context.set_trailing_metadata(trailing)

    def gather(self, method: Method, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self.stream_place():
            feed = Feed(method, requests)
            backend = self.fleet.pick(feed.target)
            with backend.holding(1):
                call = self.open_stream(method, backend, feed, context, many_replies=False)
                with self.watchdog.over(feed.progress):
                    try:
                        reply: bytes = call.result()
                    except (grpc.RpcError, grpc.FutureCancelledError):
                        feed.explain(self.timeout_secs)
                        pass_on(context, backend, call)
                pass_metadata(context, call)
                return reply

    def open_stream(
        self, method: Method, backend: Backend, feed: Feed, context: grpc.ServicerContext, many_replies: bool
    ) -> Any:
        remaining = context.time_remaining()
        timeout = remaining if remaining is not None and remaining < LONGEST_WAIT_SECS else None
        callable_ = backend.method(method.path, many_requests=True, many_replies=many_replies)
        start = callable_ if many_replies else callable_.future
        call = start(feed, timeout=timeout, metadata=along(context))
        feed.progress.cancel = call.cancel
        follow_cancel(context, call)
        return call

    def left(self, context: grpc.ServicerContext) -> float | None:
        """Seconds this call may still take: the caller's deadline and ours, whichever is nearer."""
        remaining = context.time_remaining()
        limits = [
            limit for limit in (remaining, self.timeout_secs or None) if limit is not None and limit < LONGEST_WAIT_SECS
        ]
        return min(limits, default=None)

    def stream_place(self) -> StreamPlace:
        return StreamPlace(self.streams, self.parallel_streams)


class StreamPlace:
    """One of grpc_max_parallel_streams places."""

    def __init__(self, places: threading.BoundedSemaphore, count: int) -> None:
        self.places = places
        self.count = count

    def __enter__(self) -> None:
        if not self.places.acquire(blocking=False):
            raise Problem(
                Kind.EXHAUSTED,
                "TOO_MANY_STREAMS",
                f"{self.count} streams are open already: close some or raise grpc_max_parallel_streams",
            )

    def __exit__(self, *_: object) -> None:
        self.places.release()


class Feed:
    """The inner requests of a stream, as the replica's call reads them.

    The first message is read at once, for its target. A later message that is wrong ends the call: `explain` then
    raises its Problem instead of the cancellation that it caused.
    """

    def __init__(self, method: Method, requests: Iterator[bytes]) -> None:
        self.method = method
        self.requests = requests
        self.problem: Problem | None = None
        self.progress = Progress(cancel=lambda: None)
        first = next(requests, None)
        if first is None:
            raise invalid("Empty stream: send at least one message")
        self.target, self.waiting = opened(method, first)
        self.count = 0

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> bytes:
        if self.count:
            try:
                self.waiting = self.following(next(self.requests))
            except Problem as problem:
                self.problem = problem
                self.progress.cancel()
                raise StopIteration from None
            except grpc.RpcError:  # the caller is gone; the cancellation follows its own way
                raise StopIteration from None
        self.count += 1
        self.progress.sent()
        return self.waiting

    def following(self, raw: bytes) -> bytes:
        target, inner = unwrap(raw)
        if target is not None and target != self.target:
            raise invalid(
                f"Message {self.count} of the stream asks for {target}, but the first one asked for {self.target}: "
                "one stream has one target"
            )
        if inner is None:
            raise invalid(f"Message {self.count} of the stream has no request")
        return inner

    def explain(self, timeout_secs: float) -> None:
        """Raises: the reason for which this side ended the call, if it did."""
        if self.problem:
            raise self.problem
        if self.progress.stalled:
            message = f"No answer for {timeout_secs:g} s from the replica (grpc_request_timeout_secs)"
            raise Problem(Kind.TIMEOUT, "TIMEOUT", message)


def opened(method: Method, raw: bytes) -> tuple[Target, bytes]:
    target, inner = unwrap(raw)
    if target is None:
        raise invalid("Missing target: set target.instance_name, target.model_id or target.instance_index")
    if inner is None and method.needs_request:
        raise invalid(f"Missing {method.name} request: set the field request")
    return target, inner or b""


def along(context: grpc.ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata that concerns the replica: traces and the like."""
    return tuple(
        (key, value)
        for key, value in context.invocation_metadata()
        if key not in OWN_METADATA and not key.startswith(("grpc-", ":"))
    )


def follow_cancel(context: grpc.ServicerContext, call: Any) -> None:
    """Cancel the replica's call when the caller's ends first."""
    if not context.add_callback(call.cancel):
        call.cancel()


def pass_metadata(context: grpc.ServicerContext, call: Any) -> None:
    """TEI's unary replies carry their x-compute-* numbers as initial metadata."""
    if initial := call.initial_metadata():
        context.send_initial_metadata(initial)
    if trailing := call.trailing_metadata():
        context.set_trailing_metadata(trailing)


def pass_on(context: grpc.ServicerContext, backend: Backend, call: Any) -> NoReturn:
    """End the caller's call as the replica's call ended."""
    code, details = call.code(), call.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        replica = backend.replica
        details = f'Replica {replica.index} of "{replica.instance}" does not answer, see its logs: {details}'
    if trailing := call.trailing_metadata():
        context.set_trailing_metadata(trailing)
    context.abort(code, details)
    raise AssertionError  # not reached: abort raises, which grpc does not declare
