"""What every gRPC server of ours has: bounded threads and sizes, health, reflection, errors with a name.

A guarded one asks who calls before it reads what he sends, and ends a call whose caller does not go on: who sends half
of a message, or does not read his answers, would hold memory and a thread for as long as he likes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from appliance.core.budget import KEPT_BYTES
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import address
from appliance.wire.envelope import CODE_KEY, RETRY_KEY

IDLE_POLL_SECS = 0.2
HANDSHAKE_MS = 5000
QUIET_POLLS = 5  # a stream between two of its messages looks idle for a moment
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
SLOWEST_BYTES = 1024 * 1024  # a second, of a message: what may be a large one has more time
TICK_SECS = 0.25
MOMENT_SECS = 1.0

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
Authenticator = Callable[[str, grpc.ServicerContext], None]  # (full method, call); raises Problem
STATUS = {code.value[0]: code for code in grpc.StatusCode}  # by number, as it travels


def refuse(context: grpc.ServicerContext, problem: Problem, *trailing: tuple[str, str]) -> NoReturn:
    """End the call with the Problem's code and words."""
    if problem.retry_after_ms is not None:
        trailing = (*trailing, (RETRY_KEY, str(problem.retry_after_ms)))
    if trailing:
        context.set_trailing_metadata(trailing)
    context.abort(CODES[problem.kind], problem.message)
    raise problem  # not reached: abort raises, which grpc does not declare


def end(context: grpc.ServicerContext, problem: Problem) -> None:
    """End a call whose own thread waits in grpc for the caller, with the Problem's code and words.

    grpcio's `context.cancel` says CANCELLED and nothing else (1.85); the call beneath it takes both.
    """
    context.set_code(CODES[problem.kind])
    context._rpc_event.call.cancel(CODES[problem.kind].value[0], problem.message)


class Patience:
    """Calls that must go on. One thread ends those that did not in time."""

    def __init__(self) -> None:
        self.limits: dict[int, tuple[float, Callable[[], object]]] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        threading.Thread(target=self.watch, name="patience", daemon=True).start()

    def begin(self, secs: float, give_up: Callable[[], object]) -> int:
        """Call ``give_up`` unless `over` is called in time."""
        number = next(self.numbers)
        with self.lock:
            self.limits[number] = (time.monotonic() + secs, give_up)
        return number

    def over(self, number: int) -> None:
        with self.lock:
            self.limits.pop(number, None)

    def watch(self) -> None:
        while True:
            time.sleep(TICK_SECS)
            now = time.monotonic()
            with self.lock:
                late = [number for number, (until, _) in self.limits.items() if until < now]
                ended = [self.limits.pop(number) for number in late]
            for _, give_up in ended:
                give_up()


class Server:
    """A gRPC server on one port, with grpc.health.v1 and reflection (v1 and v1alpha) for its services."""

    def __init__(
        self,
        threads: int,
        max_message_bytes: int,
        shared_port: bool,
        authenticator: Authenticator | None = None,
        patience_secs: float = 0,
        reserve: Reserve | None = None,
    ) -> None:
        """patience_secs: how long a guarded call waits for its caller to go on, for a large message longer; 0: for
        ever. reserve: where the memory of a guarded call's large messages is booked."""
        self.health = health.HealthServicer()
        self.services: list[str] = []
        self.grpc = grpc.server(
            ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rpc"),
            interceptors=[AuthenticationInterceptor(authenticator, patience_secs, max_message_bytes, reserve)]
            if authenticator
            else [],
            maximum_concurrent_rpcs=threads,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(shared_port)),
                # Clients of ours ask every 20 s of a long call whether we still live; grpc's own limit is 300 s.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ],
        )

    def add(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self.services.append(service)
        self.grpc.add_registered_method_handlers(service, handlers)
        self.set_health(service, True)

    def set_health(self, service: str, serving: bool) -> None:
        """What grpc.health.v1 says of one service; the empty name, the whole server, is always SERVING."""
        status = health_pb2.HealthCheckResponse
        self.health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def start(
        self, host: str, port: int, credentials: grpc.ServerCredentials | None = None, own_socket: Path | None = None
    ) -> None:
        """Open the port, with TLS where there are credentials, and a socket for this user alone.

        Raises: Problem that names the port when it is taken.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = [*self.services, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1]
        reflection.enable_server_reflection(names, self.grpc)
        self.grpc.add_generic_rpc_handlers((reflection_v1(names),))
        where = address(host, port)
        try:
            if credentials:
                self.grpc.add_secure_port(where, credentials)
            else:
                self.grpc.add_insecure_port(where)
            if own_socket:
                # grpc deletes at its end what bears the name it was given (1.85). A process that an earlier supervisord
                # left behind would take the socket of its successor along; so each has a name that nobody else has.
                born = own_socket.with_name(f"{os.getpid()}.sock")
                before = os.umask(0o077)
                try:
                    self.grpc.add_insecure_port(f"unix:{born}")
                finally:
                    os.umask(before)
                os.replace(born, own_socket)
        except RuntimeError as error:
            raise Problem(
                Kind.UNAVAILABLE, "PORT_CONFLICT", f"Cannot listen on {where}: is the port in use?"
            ) from error
        self.grpc.start()

    def stop(self, grace_secs: float, idle: Callable[[], bool] = lambda: False) -> None:
        """Refuse new calls and let running ones end: until none runs, ``idle`` holds, or ``grace_secs`` passed.

        idle: whether no call has work in hand; calls that merely stay open (an idle stream, a health watch) are then
        ended, because they could hold the process for ever.
        """
        self.health.enter_graceful_shutdown()
        ended = self.grpc.stop(grace_secs)
        quiet = 0
        while not ended.wait(IDLE_POLL_SECS):
            quiet = quiet + 1 if idle() else 0
            if quiet == QUIET_POLLS:
                self.grpc.stop(IDLE_POLL_SECS).wait()
                return


class AuthenticationInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Asks the authenticator before each call, also of methods that do not exist: who may not come in learns nothing.

    grpc reads the message of a unary request before it calls the handler (1.85), so to grpc all requests are streams:
    of who may not come in no more is taken than what the flow control lets him send unasked. 30 strangers with 38 MB
    each had 1.2 GB.
    """

    def __init__(
        self, authenticator: Authenticator, patience_secs: float, max_message_bytes: int, reserve: Reserve | None
    ) -> None:
        self.authenticator = authenticator
        self.reserve = reserve
        self.patience_secs = patience_secs
        self.max_message_bytes = max_message_bytes
        self.longest_secs = patience_secs + max_message_bytes / SLOWEST_BYTES
        self.patience = Patience()
        self.wrapped: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}  # method: as it was, and is

    def intercept_service(self, continuation: Any, details: Any) -> grpc.RpcMethodHandler:
        handler, method = continuation(details), details.method
        if handler is None:  # not kept: callers could fill the memory with names
            return self.around(method, grpc.stream_stream_rpc_method_handler(unimplemented))
        known = self.wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self.wrapped[method] = handler, self.around(method, handler)
        return known[1]

    def around(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        sides = (handler.request_streaming, handler.response_streaming)
        behavior = getattr(handler, "_".join("stream" if streaming else "unary" for streaming in sides))
        many = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler

        @wraps(behavior)  # grpc's health watch is marked by an attribute, and then has a third argument
        def guarded(requests: Iterator[Any], context: grpc.ServicerContext, *more: Any) -> Any:
            try:
                self.authenticator(method, context)
                if handler.request_streaming:
                    request = each_readable(requests, context) if handler.request_deserializer else requests
                else:
                    request = self.only(requests, context)
                answer = behavior(request, context, *more)
                if more:  # it has sent its answers by itself
                    return answer
                return self.each_read(answer, context) if many else self.read(answer, context)
            except Problem as problem:
                refuse(context, problem, (CODE_KEY, problem.code))

        return make(guarded, readable(handler.request_deserializer), handler.response_serializer)

    def only(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """The one request of a unary call, which has to arrive in time. Raises: Problem."""
        arrival = Arrival(self, context)
        try:
            request = next(requests, None)
        finally:
            arrival.over()
        if request is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "This method requires exactly one request message")
        if request is UNREADABLE:
            refuse_unreadable(context)
        self.keep(request, context)
        return request

    def read(self, answer: Any, context: grpc.ServicerContext) -> Any:
        """The one answer, as it is; its call must have ended in time. Raises: Problem."""
        self.keep(answer, context)
        if self.patience_secs:
            at_end(context, partial(self.patience.over, self.wait_for(answer, context)))
        return answer

    def each_read(self, answers: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The answers as they are; grpc takes the next when it has sent one (1.85)."""
        for answer in answers:
            number = self.wait_for(answer, context) if self.patience_secs else 0
            try:
                yield answer
            finally:
                self.patience.over(number)

    def wait_for(self, answer: Any, context: grpc.ServicerContext) -> int:
        secs = self.patience_secs + (len(answer) / SLOWEST_BYTES if isinstance(answer, bytes) else 0)
        return self.patience.begin(secs, partial(end, context, not_read(secs)))

    def keep(self, message: Any, context: grpc.ServicerContext) -> None:
        """Book a large message until its call has ended: nobody has it for longer. Raises: Problem."""
        if self.reserve and isinstance(message, bytes) and len(message) >= KEPT_BYTES:
            reservation = self.reserve()
            reservation.grow(len(message))
            at_end(context, reservation.release)


class Arrival:
    """A request on its way. Nobody knows how much of it is there: after a moment it counts as the largest one."""

    def __init__(self, guarding: AuthenticationInterceptor, context: grpc.ServicerContext) -> None:
        self.guarding, self.context = guarding, context
        self.arrived = False
        self.reservation = guarding.reserve() if guarding.reserve else None
        self.numbers = [guarding.patience.begin(MOMENT_SECS, self.takes_long)]

    def takes_long(self) -> None:
        try:
            if self.reservation:
                self.reservation.grow(self.guarding.max_message_bytes, bounded=True, wait_secs=0)
        except Problem as problem:
            self.fail(problem)
            return
        if self.guarding.patience_secs:
            secs = self.guarding.longest_secs
            give_up = partial(self.fail, not_sent(secs))
            self.numbers.append(self.guarding.patience.begin(secs - MOMENT_SECS, give_up))

    def fail(self, problem: Problem) -> None:
        if not self.arrived:
            end(self.context, problem)

    def over(self) -> None:
        self.arrived = True
        for number in self.numbers:
            self.guarding.patience.over(number)
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


UNREADABLE = object()  # a message that is none of its method's


def readable(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """As ``deserialize``, without grpc's INTERNAL and a traceback in the log for what somebody sent."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except Exception:  # protobuf's DecodeError, and what its runtimes raise beside it
            return UNREADABLE

    return read


def each_readable(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    for request in requests:
        if request is UNREADABLE:
            refuse_unreadable(context)
        yield request


def refuse_unreadable(context: grpc.ServicerContext) -> NoReturn:
    refuse(context, invalid("The request is no message of this method"))


def unimplemented(request: Any, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    raise AssertionError  # not reached: abort raises


def reflection_v1(services: Sequence[str]) -> grpc.GenericRpcHandler:
    """grpc.reflection.v1: the messages are those of v1alpha, byte for byte, under another service name."""
    servicer = reflection.ReflectionServicer(services)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
