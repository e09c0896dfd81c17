"""The relay shapes: who shall answer is read, the inner bytes go to a replica, the reply's bytes come back.

What is left of the caller's deadline goes along, a cancelled call is cancelled at the replica, and the replica's own
errors come back unchanged: code, message and metadata. Calls wait at the gate of their instance while its replicas are
full. What a replica did not answer before it went away (UNAVAILABLE) is sent once to another.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import grpc

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target
from appliance.drivers.grpcserver import STATUS, refuse
from appliance.drivers.http2 import INTERNAL, CallFailed, Exchange
from appliance.drivers.tei import Backend
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.feed import Feed
from appliance.multiplexer.fleet import Fleet
from appliance.multiplexer.gate import Full, Gate
from appliance.multiplexer.metering import Call, Metering
from appliance.multiplexer.progress import Watchdog
from appliance.wire.envelope import CODE_KEY, INSTANCE_KEY, MODEL_KEY, RETRY_KEY
from appliance.wire.methods import Method, Shape

# Ours to read, or the transport's to set: everything else of the caller's metadata goes along.
OWN_METADATA = {INSTANCE_KEY, MODEL_KEY, "authorization", "user-agent", "content-type", "te"}
LONGEST_WAIT_SECS = 10**7  # grpc reports "no deadline" as some centuries
# What grpc says itself when a peer is gone (1.85); every other text is TEI's own and passes unchanged.
TRANSPORT = re.compile(
    r"(Socket closed|recvmsg|sendmsg|failed to connect|ipv[46]:|Connection|Stream removed|GOAWAY)", re.I
)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
LOOK_SECS = 60.0  # a waiting thread that wakes up to look at the clock takes a turn from one that has work
OVERLOADED = "overloaded"  # in TEI's words for a call over its max_concurrent_requests
OVERLOADED_PAUSES = (0.005, 0.02, 0.05, 0.1)  # seconds
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
# A replica that listens again is connected within a second, on a busy machine a little later.
RETURN_SECS, RETURN_POLL_SECS = 3.0, 0.05


class Relay:
    """Handlers for the rows of `wire.methods`. timeout_secs 0: only the caller's deadline counts."""

    def __init__(self, fleet: Fleet, metering: Metering, timeout_secs: float, parallel_streams: int) -> None:
        self.metering = metering
        self.fleet = fleet
        self.timeout_secs = timeout_secs
        self.watchdog = Watchdog(timeout_secs)
        self.streams = threading.BoundedSemaphore(parallel_streams)
        self.parallel_streams = parallel_streams

    def handler(self, method: Method, addressing: Addressing) -> grpc.RpcMethodHandler:
        """The gRPC handler of one row; bytes in, bytes out."""
        if method.shape is Shape.UNARY:

            def unary(raw: bytes, context: grpc.ServicerContext) -> bytes:
                with self.metering.over(method.name, context) as call, named(context):
                    call.target, inner = addressing.first(method, raw, context)
                    reply, exchange = self.unary(method, call.target, inner, context, call)
                    call.texts = 1
                    context.send_initial_metadata(exchange.headers)
                    if exchange.trailers:
                        context.set_trailing_metadata(exchange.trailers)
                    return reply

            return grpc.unary_unary_rpc_method_handler(unary)

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self.metering.over(method.name, context) as call, named(context), self.stream_place():
                feed = Feed(method, addressing, requests, context)
                call.target = feed.target
                try:
                    yield from self.stream(method, feed, context)
                finally:
                    call.texts = feed.answered

        return grpc.stream_stream_rpc_method_handler(stream)

    def unary(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, call: Call
    ) -> tuple[bytes, Exchange]:
        """The reply, and the exchange with the replica's metadata. A failure ends the caller's call."""
        backend = self.fleet.pick(target)
        call.instance = backend.replica.instance
        with ExitStack() as places:
            gate = self.fleet.gate(backend)
            if self.admitted(gate, places, call, context):
                backend = self.fleet.pick(Target(instance_name=backend.replica.instance))  # whose gate was passed
            try:
                with call.away():
                    return self.ask_patiently(method, backend, inner, context)
            except CallFailed as failure:
                gone = failure.code == UNAVAILABLE.value[0] and context.is_active()
                other = self.another(target, backend, context) if gone else None
                if other is None:
                    end_as(context, backend, failure)
            call.instance = other.replica.instance
            if self.fleet.gate(other) is not gate:  # another instance of the model
                places.close()
                self.admitted(self.fleet.gate(other), places, call, context)
            try:
                with call.away():
                    return self.ask_patiently(method, other, inner, context)
            except CallFailed as failure:
                end_as(context, other, failure)

    def admitted(self, gate: Gate, places: ExitStack, call: Call, context: grpc.ServicerContext) -> bool:
        """Take a place of the gate into ``places``; whether it had to be waited for. Raises as `Gate.single`."""
        before = call.elsewhere
        try:
            with call.away():
                return places.enter_context(gate.single(time_left(context), context.add_callback))
        finally:
            self.metering.meters.waits.observe(call.elsewhere - before)

    def ask_patiently(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext
    ) -> tuple[bytes, Exchange]:
        """One try, and some more while the replica says that it is full: it was not by our count. Raises: CallFailed.

        A replica may answer a text a moment before it counts its place as free, and the monitor asks it, too.
        """
        for pause in OVERLOADED_PAUSES:
            try:
                return self.ask(method, backend, inner, context)
            except CallFailed as failure:
                if failure.code != EXHAUSTED or not context.is_active():
                    raise
            time.sleep(pause)
        try:
            return self.ask(method, backend, inner, context)
        except CallFailed as failure:
            full = failure.code == EXHAUSTED and OVERLOADED in failure.details
            if full and not any(key == RETRY_KEY for key, _ in failure.trailing):
                failure.trailing.append((RETRY_KEY, str(self.fleet.gate(backend).retry_after_ms())))
            raise

    def ask(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext
    ) -> tuple[bytes, Exchange]:
        """One try at one replica. Raises: CallFailed."""
        limit = self.limit(context)
        deadline = None if limit is None else time.monotonic() + limit
        metadata = [*along(context), *(() if limit is None else (("grpc-timeout", timeout_of(limit)),))]

        def check() -> float:
            left = LOOK_SECS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise CallFailed(DEADLINE, f"No answer from the replica within {limit:.3g} s", [], answered=True)
            return min(left, LOOK_SECS)

        with backend.holding(1), self.fleet.line(backend) as line:
            exchange = line.begin(method.path, (inner,), metadata)
            if not context.add_callback(lambda: line.abort(exchange)):
                line.abort(exchange)
            replies = list(line.replies(exchange, check))
        exchange.headers.append((INSTANCE_KEY, backend.replica.instance))
        if len(replies) != 1:
            raise CallFailed(INTERNAL, f"the replica sent {len(replies)} replies to one request", [], answered=True)
        return replies[0], exchange

    def another(self, target: Target, gone: Backend, context: grpc.ServicerContext) -> Backend | None:
        """A replica in place of one that went away, if need be one that is coming back just now."""
        patience = time.monotonic() + RETURN_SECS
        while context.is_active():
            try:
                return self.fleet.pick(target, without=(gone,))
            except Problem:
                if not self.fleet.has_others(target, gone) or time.monotonic() > patience:
                    break
            time.sleep(RETURN_POLL_SECS)
        return None

    def stream(self, method: Method, feed: Feed, context: grpc.ServicerContext) -> Iterator[bytes]:
        backend = self.fleet.pick(feed.target)
        spared = -1  # answers at which a replica went away: going away again without one more is the end
        while True:
            call = self.open_stream(method, backend, feed, context)
            try:
                with self.watchdog.over(feed.progress):
                    for reply in call:
                        feed.received()
                        yield reply
                feed.explain(self.timeout_secs)  # a bad message may be noticed after the replica's last answer
                if trailing := call.trailing_metadata():
                    context.set_trailing_metadata(trailing)
                return
            except (grpc.RpcError, grpc.FutureCancelledError):
                feed.explain(self.timeout_secs)
                gone = call.code() is UNAVAILABLE or backend.is_cut
                other = self.another(feed.target, backend, context) if gone else None
                if other is None or feed.answered == spared:
                    pass_on(context, backend, call)
                spared, backend = feed.answered, other
            finally:
                feed.detach()

    def open_stream(self, method: Method, backend: Backend, feed: Feed, context: grpc.ServicerContext) -> Any:
        messages = feed.attach(backend, self.fleet.gate(backend))
        start = backend.method(method.path, many_requests=True, many_replies=True)
        call = start(messages, timeout=time_left(context), metadata=along(context))
        feed.progress.cancel = call.cancel
        if feed.problem:  # noticed before there was a call to cancel
            call.cancel()
        follow_cancel(context, call)
        return call

    def limit(self, context: grpc.ServicerContext) -> float | None:
        """Seconds a unary call may still take: the caller's deadline and ours, whichever is nearer."""
        limits = [limit for limit in (time_left(context), self.timeout_secs or None) if limit is not None]
        return min(limits, default=None)

    @contextmanager
    def stream_place(self) -> Iterator[None]:
        """One of grpc_max_parallel_streams places."""
        if not self.streams.acquire(blocking=False):
            raise Problem(
                Kind.EXHAUSTED,
                "TOO_MANY_STREAMS",
                f"{self.parallel_streams} streams are open already: close some or raise grpc_max_parallel_streams",
            )
        try:
            yield
        finally:
            self.streams.release()


@contextmanager
def named(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with the code and words of a Problem that its work raises."""
    try:
        yield
    except Full as full:
        refuse(context, full, (CODE_KEY, full.code), (RETRY_KEY, str(full.retry_after_ms)))
    except Problem as problem:
        refuse(context, problem, (CODE_KEY, problem.code))


def time_left(context: grpc.ServicerContext) -> float | None:
    """Seconds to the caller's deadline; None where there is none."""
    remaining = context.time_remaining()
    return remaining if remaining is not None and remaining < LONGEST_WAIT_SECS else None


def timeout_of(seconds: float) -> str:
    """grpc-timeout: at most eight digits and a unit; rounded up, so that our own deadline is the one that is met."""
    milliseconds = math.ceil(seconds * 1000) + 1
    return f"{milliseconds}m" if milliseconds < 10**8 else f"{math.ceil(seconds)}S"


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


def end_as(context: grpc.ServicerContext, backend: Backend, failure: CallFailed) -> NoReturn:
    """End the caller's call as the replica's call ended."""
    details = failure.details
    if not failure.answered:
        replica = backend.replica
        details = f'Replica {replica.index} of "{replica.instance}" does not answer, see its logs: {details}'
    if failure.trailing:
        context.set_trailing_metadata(failure.trailing)
    context.abort(STATUS.get(failure.code, grpc.StatusCode.UNKNOWN), details)
    raise AssertionError  # not reached: abort raises, which grpc does not declare


def pass_on(context: grpc.ServicerContext, backend: Backend, call: Any) -> NoReturn:
    """End the caller's call as the replica's call ended."""
    code, details = call.code(), call.details() or ""
    if backend.is_cut:
        code, details = UNAVAILABLE, "Connection ended, because it is withheld"
    if code is UNAVAILABLE and TRANSPORT.match(details):
        replica = backend.replica
        details = f'Replica {replica.index} of "{replica.instance}" does not answer, see its logs: {details}'
    if trailing := call.trailing_metadata():
        context.set_trailing_metadata(trailing)
    context.abort(code, details)
    raise AssertionError  # not reached: abort raises, which grpc does not declare
