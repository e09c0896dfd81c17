"""Callers who wait for one computation, as one caller: it goes on until the last of them has left."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from appliance.multiplexer.caller import time_left
from appliance.multiplexer.cooperation import ReplyScheduler, WouldBlock


class CallEnded(Exception):
    """The computation ended as a call does: code, words and trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, trailing


class PartOfCall:
    """What `attempts` and `streams` use of a `grpc.ServicerContext`, where their end is not that of the call itself.

    scheduler: of the thread, where other parts of the call run in it, too.
    """

    def __init__(self, context: grpc.ServicerContext, scheduler: ReplyScheduler | None = None) -> None:
        self.context = context
        self.scheduler = scheduler
        self.trailing: Sequence[tuple[str, str | bytes]] = ()

    def invocation_metadata(self) -> Any:
        return self.context.invocation_metadata()

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str | bytes]]) -> None:
        self.trailing = trailing

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Raises: CallEnded."""
        raise CallEnded(code, details, self.trailing)


def scheduler_of(context: grpc.ServicerContext | PartOfCall) -> ReplyScheduler | None:
    """With which other parts of its call one runs in one thread."""
    return context.scheduler if isinstance(context, PartOfCall) else None


def may_block(context: grpc.ServicerContext | PartOfCall) -> None:
    """Before each wait but the one for a reply. Raises: WouldBlock where it would hold up other parts of the call."""
    if scheduler_of(context):
        raise WouldBlock


class JoinedCall(PartOfCall):
    """For all callers together.

    Their metadata is the first one's. It has a deadline only while every caller has one, and then the latest.
    """

    def __init__(self, first: grpc.ServicerContext) -> None:
        super().__init__(first, scheduler_of(first))
        self.callers: set[grpc.ServicerContext] = set()
        self.callbacks: list[Callable[[], Any]] = []
        self.over = False  # all have left
        self.told_until: float | None = None  # the earliest deadline that the computation was told; of time.monotonic
        self.lock = threading.Lock()
        self.add(first)

    def add(self, context: grpc.ServicerContext) -> bool:
        """One more who waits; False when all others have left, so that nothing is computed any more."""
        with self.lock:
            if self.over:
                return False
            self.callers.add(context)
        if not context.add_callback(lambda: self.leave(context)):
            self.leave(context)
        return True

    def leave(self, context: grpc.ServicerContext) -> None:
        with self.lock:
            self.callers.discard(context)
            if self.callers or self.over:
                return
            self.over = True
            callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    # -- as a ServicerContext has it ----------------------------------------------------------------------------------

    def is_active(self) -> bool:
        return not self.over

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        with self.lock:
            if not self.over:
                self.callbacks.append(callback)
            return not self.over

    def time_remaining(self) -> float | None:
        with self.lock:
            callers = list(self.callers)
        left = [time_left(context) for context in callers]
        known = [each for each in left if each is not None]
        latest = max(known, default=None) if len(known) == len(left) else None
        until = math.inf if latest is None else time.monotonic() + latest
        self.told_until = until if self.told_until is None else min(self.told_until, until)
        return latest
