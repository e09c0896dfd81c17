"""The same computation asked for by many callers at once is done once, and they all get what it gave.

It is done by the thread of the first one. When that caller leaves, it goes on as long as another waits. A caller whose
time is not over when the computation ended for lack of time asks anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from appliance.core.problems import Kind, Problem
from appliance.multiplexer.caller import time_left
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.joined_call import CallEnded, JoinedCall, may_block

Result = TypeVar("Result")
LEFT = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
LONGEST_WAIT_SECS = 3600.0


class Flight(Generic[Result]):
    def __init__(self, first: grpc.ServicerContext) -> None:
        self.call = JoinedCall(first)
        self.landed = threading.Event()
        self.waiters: list[Callable[[], None]] = []
        self.result: Result | None = None
        self.failure: Problem | CallEnded | None = None
        self.given_up = False  # its first caller begins anew

    def get(self) -> Result:
        """Raises: what the computation raised, as another one: each is raised by one thread."""
        failure = self.failure
        if isinstance(failure, Problem):
            raise Problem(failure.kind, failure.code, failure.message, failure.retry_after_ms)
        if failure:
            raise CallEnded(failure.code, failure.details, failure.trailing)
        return cast(Result, self.result)

    @property
    def ran_out(self) -> bool:
        """Whether it ended because its callers had no more time, or was given up. A replica that does not answer is
        nobody's hurry: who asked anew would wait as long again."""
        if self.given_up:
            return True
        if self.call.told_until is not None and time.monotonic() < self.call.told_until and not self.call.over:
            return False
        if isinstance(self.failure, Problem):
            return self.failure.kind is Kind.TIMEOUT or self.failure.code == "CANCELLED"
        return isinstance(self.failure, CallEnded) and self.failure.code in LEFT

    def wait(self, context: grpc.ServicerContext, secs: float) -> None:
        """Until it has landed, or this caller has left."""
        woken = threading.Event()
        self.waiters.append(woken.set)
        if self.landed.is_set() or not context.add_callback(woken.set):
            return
        woken.wait(secs)

    def land(self) -> None:
        self.landed.set()
        for wake in list(self.waiters):
            wake()


class SingleFlight(Generic[Result]):
    """Thread-safe. on_join: called when a caller waits for another one's computation."""

    def __init__(self) -> None:
        self.flights: dict[bytes, Flight[Result]] = {}
        self.lock = threading.Lock()

    def compute(
        self,
        key: bytes,
        context: grpc.ServicerContext,
        work: Callable[[Any], Result],
        found: Callable[[], Result | None],
        joined: Callable[[], None],
    ) -> Result:
        """``work(caller)``, or what another thread's gave meanwhile. found: looks once more for a result of a moment
        ago, before the work begins. joined: called when this caller waits for another one's work.

        Raises: Problem, CallEnded.
        """
        while True:
            with self.lock:
                flight = self.flights.get(key)
                is_first = flight is None or not flight.call.add(context)
                if is_first:
                    if (present := found()) is not None:
                        return present
                    flight = self.flights[key] = Flight(context)
            assert flight
            if is_first:
                return self.fly(key, flight, work)
            may_block(context)
            joined()
            left = time_left(context)
            flight.wait(context, LONGEST_WAIT_SECS if left is None else left)
            if not flight.landed.is_set() or not context.is_active():
                raise Problem(Kind.TIMEOUT, "TIMEOUT", "The deadline passed before the answer was computed")
            if flight.ran_out and context.is_active():
                continue
            return flight.get()

    def fly(self, key: bytes, flight: Flight[Result], work: Callable[[Any], Result]) -> Result:
        flight.failure = Problem(Kind.INTERNAL, "INTERNAL", "The computation failed: see the log")
        try:
            flight.result = work(flight.call)
            flight.failure = None
            return flight.result
        except (Problem, CallEnded) as failure:
            flight.failure = failure
            raise
        except WouldBlock:
            flight.given_up = True
            raise
        finally:
            with self.lock:
                if self.flights.get(key) is flight:
                    del self.flights[key]
            flight.land()
