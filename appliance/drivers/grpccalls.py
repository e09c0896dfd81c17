"""What happens to each call of a gRPC server: authentication, limits of time, memory for large messages, named errors.

Without limits of time a caller that sends half of a message, or does not read its answers, would hold memory and a
thread for as long as it likes.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, Protocol

import grpc

from appliance.core.budget import KEPT_BYTES, SLOWEST_BYTES
from appliance.core.problems import Kind, Problem, invalid
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.envelope import CODE_KEY, EXPRESS_ADMITTED, EXPRESS_KEY, FINAL, RETRY_KEY

TICK_SECS = 0.25
MOMENT_SECS = 1.0
ADMITTED_SECS = 1.0  # between two looks at the key of a stream
LOOK_SECS = 60.0  # a waiting thread that wakes up to look at the clock takes a turn from one that has work

CODES = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Kind.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Kind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
}


class MessageReservation(Protocol):
    """What the messages of a call have reserved of the memory of this process (`drivers.memory`)."""

    def grow(self, size: int, bounded: bool = ..., wait_secs: float = ...) -> None: ...

    def release(self) -> None: ...


Reserve = Callable[[], MessageReservation]
Authenticate = Callable[[str, grpc.ServicerContext], None]  # (full method, call); raises Problem
STATUS = {code.value[0]: code for code in grpc.StatusCode}  # by number, as it travels


def refuse(
    context: grpc.ServicerContext, problem: Problem, *trailing: tuple[str, str], is_final: bool = True
) -> NoReturn:
    """End the call with the Problem's code and words. is_final: see `abort`."""
    if problem.retry_after_ms is not None:
        trailing = (*trailing, (RETRY_KEY, str(problem.retry_after_ms)))
    abort(context, CODES[problem.kind], problem.message, trailing, is_final)


def abort(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    details: str,
    trailing: Sequence[tuple[str, str | bytes]],
    is_final: bool = True,
) -> NoReturn:
    """End the call. is_final: to Envoy with the word that nothing is to be tried again, as the multiplexer has done
    that; what a replica refuses goes to the multiplexer."""
    if is_final and (EXPRESS_KEY, EXPRESS_ADMITTED) in context.invocation_metadata():
        trailing = (*trailing, FINAL)
    if trailing:
        context.set_trailing_metadata(trailing)
    context.abort(code, details)
    raise AssertionError  # not reached: abort raises, which grpc does not declare


def end_from_outside(context: grpc.ServicerContext, problem: Problem) -> None:
    """End a call whose own thread waits in grpc for the caller, with the Problem's code and words.

    grpcio's `context.cancel` says CANCELLED and nothing else (1.85); the call beneath it takes both.
    """
    context.set_code(CODES[problem.kind])
    context._rpc_event.call.cancel(CODES[problem.kind].value[0], problem.message)


def hand_in(context: grpc.ServicerContext, problem: Problem) -> None:
    """Give the Problem, instead of its request, to a thread that waits in grpc for one, so that it refuses the call.

    Only the thread of a call can end it with trailing metadata (1.85), and callers are told there when to try again.
    """
    state = context._state
    with state.condition:
        state.request = problem
        state.condition.notify_all()


def deadline_check(seconds: float | None, words: str) -> Callable[[], float]:
    """What a call's reader asks for how long it may wait. It raises CallFailed once the seconds are over.

    words: with a place for the seconds.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds

    def check() -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise CallFailed(Status(Code.DEADLINE_EXCEEDED, words.format(seconds)), answered=True)
        return min(left, LOOK_SECS)

    return check


ENDED = (0.0, lambda: None)  # instead of a limit that is not there any more


class TimeLimits:
    """What has to be over in time. One thread gives up what is not.

    Without a lock: answers that are collected as garbage `end` their limit in the midst of whatever their thread does,
    also of another `begin`. With one, that thread waited for itself, and then every call for it.
    """

    def __init__(self) -> None:
        self.limits: dict[int, tuple[float, Callable[[], object]]] = {}
        self.numbers = itertools.count()
        threading.Thread(target=self.watch, name="time-limits", daemon=True).start()

    def begin(self, secs: float, give_up: Callable[[], object]) -> int:
        """Call ``give_up`` unless `end` is called with the returned number in time."""
        number = next(self.numbers)
        self.limits[number] = (time.monotonic() + secs, give_up)
        return number

    def end(self, number: int) -> None:
        self.limits.pop(number, None)

    def watch(self) -> None:
        while True:
            time.sleep(TICK_SECS)
            now = time.monotonic()
            for number, (until, give_up) in self.limits.copy().items():
                if until < now and self.limits.pop(number, ENDED) is not ENDED:  # meanwhile
                    give_up()


class AuthenticationInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Authentication is required before each call, also of methods that do not exist: a stranger learns nothing.

    grpc reads the message of a unary request before it calls the handler (1.85), so to grpc all requests are streams:
    of a stranger no more is taken than what the flow control lets a client send unasked. 30 strangers with 38 MB each
    had 1.2 GB.

    timeout_secs: how long a call waits for its caller to go on, longer for a large message; 0: for ever. reserve: where
    memory for large messages comes from.
    """

    def __init__(
        self,
        authenticate: Authenticate,
        max_message_bytes: int,
        timeout_secs: float = 0,
        reserve: Reserve | None = None,
    ) -> None:
        self.authenticate = authenticate
        self.reserve = reserve
        self.timeout_secs = timeout_secs
        self.max_message_bytes = max_message_bytes
        self.longest_secs = timeout_secs + max_message_bytes / SLOWEST_BYTES
        self.limits = TimeLimits()
        self.wrapped: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}  # method: as it was, and is

    def intercept_service(self, continuation: Any, details: Any) -> grpc.RpcMethodHandler:
        handler, method = continuation(details), details.method
        if handler is None:  # not kept: callers could fill the memory with names
            return self.wrap(method, grpc.stream_stream_rpc_method_handler(unimplemented))
        pair = self.wrapped.get(method)
        if pair is None or pair[0] is not handler:
            pair = self.wrapped[method] = handler, self.wrap(method, handler)
        return pair[1]

    def wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        sides = (handler.request_streaming, handler.response_streaming)
        behavior = getattr(handler, "_".join("stream" if streaming else "unary" for streaming in sides))
        many = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler

        @wraps(behavior)  # grpc's health watch is marked by an attribute, and then has a third argument
        def authenticated(requests: Iterator[Any], context: grpc.ServicerContext, *more: Any) -> Any:
            try:
                self.authenticate(method, context)
                if handler.request_streaming:
                    request = self.each_admitted(method, requests, context)
                else:
                    request = self.only_request(requests, context)
                answer = behavior(request, context, *more)
                if more:  # the health watch has sent its answers by itself
                    return answer
                return self.limit_each(answer, context) if many else self.limit_only(answer, context)
            except Problem as problem:
                refuse(context, problem, (CODE_KEY, problem.code))

        deserialize = handler.request_deserializer and readable(handler.request_deserializer)
        return make(authenticated, deserialize, handler.response_serializer)

    def each_admitted(self, method: str, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The messages of a stream as they come. The key of its caller is looked at again, every second at most: one
        that was revoked lets nothing more in, and a stream may be open for days."""
        admitted_at = time.monotonic()
        for request in requests:
            if (now := time.monotonic()) - admitted_at > ADMITTED_SECS:
                try:
                    self.authenticate(method, context)
                except Problem as problem:
                    end_from_outside(context, problem)
                    return
                admitted_at = now
            if request is UNREADABLE:
                refuse_unreadable(context)
            yield request

    def only_request(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """The one request of a unary call, which has to arrive in time. Raises: Problem."""
        arrival = Arrival(self, context)
        try:
            request = next(requests, None)
        finally:
            arrival.end()
        if isinstance(request, Problem):
            raise request
        if request is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "This method requires exactly one request message")
        if request is UNREADABLE:
            refuse_unreadable(context)
        self.reserve_for(request, context)
        return request

    def limit_only(self, answer: Any, context: grpc.ServicerContext) -> Any:
        """The one answer, as it is; its call must have ended in time. Raises: Problem."""
        self.reserve_for(answer, context)
        if self.timeout_secs:
            at_end(context, partial(self.limits.end, self.begin_limit(answer, context)))
        return answer

    def limit_each(self, answers: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The answers as they are; grpc takes the next when it has sent one (1.85)."""
        for answer in answers:
            number = self.begin_limit(answer, context) if self.timeout_secs else 0
            try:
                yield answer
            finally:
                self.limits.end(number)

    def begin_limit(self, answer: Any, context: grpc.ServicerContext) -> int:
        secs = self.timeout_secs + (len(answer) / SLOWEST_BYTES if isinstance(answer, bytes) else 0)
        return self.limits.begin(secs, lambda: end_from_outside(context, not_read(secs)))

    def reserve_for(self, message: Any, context: grpc.ServicerContext) -> None:
        """Reserve memory for a large message until its call has ended. Raises: Problem."""
        if self.reserve and isinstance(message, bytes) and len(message) >= KEPT_BYTES:
            reservation = self.reserve()
            reservation.grow(len(message))
            at_end(context, reservation.release)


class Arrival:
    """A request on its way. grpc does not tell how much of it is there: after a moment it counts as the largest one."""

    def __init__(self, interceptor: AuthenticationInterceptor, context: grpc.ServicerContext) -> None:
        self.interceptor, self.context = interceptor, context
        self.arrived = False
        self.reservation = interceptor.reserve() if interceptor.reserve else None
        self.numbers = [interceptor.limits.begin(MOMENT_SECS, self.takes_long)]

    def takes_long(self) -> None:
        try:
            if self.reservation:
                self.reservation.grow(self.interceptor.max_message_bytes, bounded=True, wait_secs=0)
        except Problem as problem:
            self.refuse(problem)
            return
        if self.interceptor.timeout_secs:
            secs = self.interceptor.longest_secs
            give_up = partial(self.refuse, not_sent(secs))
            self.numbers.append(self.interceptor.limits.begin(secs - MOMENT_SECS, give_up))

    def refuse(self, problem: Problem) -> None:
        """Again and again, as a thread that was not waiting yet has not heard it."""
        if not self.arrived:
            hand_in(self.context, problem)
            self.numbers.append(self.interceptor.limits.begin(MOMENT_SECS, partial(self.refuse, problem)))

    def end(self) -> None:
        self.arrived = True
        for number in self.numbers:
            self.interceptor.limits.end(number)
        if self.reservation:
            self.reservation.release()


def at_end(context: grpc.ServicerContext, act: Callable[[], object]) -> None:
    """When the call has ended, its answer sent; at once if it has."""
    if not context.add_callback(act):
        act()


def not_sent(secs: float) -> Problem:
    message = f"The request did not arrive within {secs:g} s (grpc_request_timeout_secs, and a second for each MiB)"
    return Problem(Kind.TIMEOUT, "TIMEOUT", message)


def not_read(secs: float) -> Problem:
    message = f"The caller does not read its answers: one has waited for {secs:.3g} s (grpc_request_timeout_secs)"
    return Problem(Kind.TIMEOUT, "TIMEOUT", message)


UNREADABLE = object()  # a message that its method cannot read


def readable(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """As ``deserialize``, without grpc's INTERNAL and a traceback in the log for what a caller sent."""

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except Exception:  # protobuf's DecodeError, and what its runtimes raise beside it
            return UNREADABLE

    return read


def refuse_unreadable(context: grpc.ServicerContext) -> NoReturn:
    refuse(context, invalid("The request is no message of this method"))


def unimplemented(request: Any, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    raise AssertionError  # not reached: abort raises
