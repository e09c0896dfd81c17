"""Plain unary calls in one thread: each is a greenlet that waits for nothing but the reply of its replica.

The handlers are those that grpcio's threads run, too. Whatever else a call would have to wait for, a place in a queue
or a replica that starts, would hold up all others: there `WouldBlock` is raised, and the call begins anew in a thread
of grpcio's.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from greenlet import getcurrent, greenlet

from appliance.core.budget import KEPT_BYTES
from appliance.drivers.memory import Reserve
from appliance.multiplexer.cooperation import Selectable, WouldBlock
from appliance.multiplexer.joined_call import CallEnded, PartOfCall
from appliance.multiplexer.relay import RefusalsAsStatus
from appliance.multiplexer.served_connection import Metadata, ServedCall

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("appliance.multiplexer")
LOOK_SECS = 0.02  # how often those who wait are asked whether their time is over
Handler = Callable[[bytes, Any], bytes]  # (message, context) -> reply
Authenticate = Callable[[str, Any], None]


class ReplyWaits:
    """For whom a reply is waited: as `cooperation.Scheduler`, in the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.poll = select.epoll()
        self.waiting: dict[int, tuple[greenlet, float]] = {}  # by the descriptor; until when, of time.monotonic
        self.looks = False
        loop.add_reader(self.poll.fileno(), self.resume)

    def wait(self, source: Selectable, events: int, secs: float) -> None:
        """Of a greenlet: let the others run until one of the events is there, or the time is over."""
        current, descriptor = getcurrent(), source.fileno()
        assert current.parent
        try:
            self.poll.modify(descriptor, events | select.EPOLLONESHOT)
        except FileNotFoundError:  # a connection that is new
            self.poll.register(descriptor, events | select.EPOLLONESHOT)
        self.waiting[descriptor] = current, time.monotonic() + secs
        if not self.looks:
            self.looks = True
            self.loop.call_later(LOOK_SECS, self.look)
        current.parent.switch()

    def resume(self) -> None:
        for descriptor, _ in self.poll.poll(0):
            if found := self.waiting.pop(descriptor, None):
                found[0].switch()

    def look(self) -> None:
        """Whose time is over goes on."""
        now = time.monotonic()
        for descriptor in [each for each, (_, until) in self.waiting.items() if until <= now]:
            if found := self.waiting.pop(descriptor, None):
                found[0].switch()
        self.looks = bool(self.waiting)
        if self.looks:
            self.loop.call_later(LOOK_SECS, self.look)


class UnaryContext(PartOfCall):
    """What handlers use of a `grpc.ServicerContext`."""

    def __init__(self, call: ServedCall, waits: ReplyWaits | None) -> None:
        super().__init__(call, waits)
        self.headers: Metadata = ()
        self.ended: grpc.StatusCode | None = None
        self.call = call
        self.add_callback = call.add_callback

    def invocation_metadata(self) -> Any:
        return self.call.request.metadata

    def time_remaining(self) -> float | None:
        return None if self.call.deadline is None else self.call.deadline - time.monotonic()

    def is_active(self) -> bool:
        return self.call.is_active

    def peer(self) -> str:
        return self.call.peer

    def code(self) -> grpc.StatusCode | None:
        return self.ended

    def send_initial_metadata(self, headers: Metadata) -> None:
        self.headers = headers

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        self.ended = code
        super().abort(code, details)


class UnaryCalls:
    """The calls of a unary server.

    handlers: by path. authenticate: raises Problem unless a call may be made. largest: bytes of a reply.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], authenticate: Authenticate, reserve: Reserve, largest: int
    ) -> None:
        self.handlers, self.authenticate, self.reserve, self.largest = handlers, authenticate, reserve, largest
        self.waits: ReplyWaits | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """In whose thread they will be."""
        self.waits = ReplyWaits(loop)

    def takes(self, path: str) -> bool:
        """Whether calls of this method may be answered here."""
        return path in self.handlers

    def admit(self, call: ServedCall) -> bool:
        """Whether the call may be made; it is refused otherwise."""
        context = UnaryContext(call, None)
        try:
            with RefusalsAsStatus(context):
                self.authenticate(call.request.path, context)
        except CallEnded as ended:
            call.fail(ended.code.value[0], ended.details, ended.trailing)
            return False
        return True

    def answer(self, call: ServedCall, message: bytes) -> None:
        """Begin it; it is answered, or forwarded, now or when its replica has replied."""
        greenlet(self.run).switch(call, message)

    def run(self, call: ServedCall, message: bytes) -> None:
        context = UnaryContext(call, self.waits)
        try:
            reply = self.handlers[call.request.path](message, context)
            self.reserve_for(reply, context)
            call.reply(context.headers, reply, context.trailing)
        except WouldBlock:
            call.forward()
        except CallEnded as ended:
            call.fail(ended.code.value[0], ended.details, ended.trailing)
        except Exception as error:
            log.exception("A call of %s failed", call.request.path)
            call.fail(grpc.StatusCode.UNKNOWN.value[0], f"Exception calling application: {error}", ())

    def reserve_for(self, reply: bytes, context: UnaryContext) -> None:
        """Reserve memory for a large reply until it has gone out. Raises: CallEnded, for one that is too large, too."""
        size = len(reply)
        if size > self.largest:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"SERVER: Sent message larger than max ({size} vs. {self.largest})"
            )
        if size >= KEPT_BYTES:
            reservation = self.reserve.reservation()
            with RefusalsAsStatus(context):
                reservation.grow(size, wait_secs=0)
            if not context.add_callback(reservation.release):
                reservation.release()
