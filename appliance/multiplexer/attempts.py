"""One unary call at its replicas: the first try, and what follows when a replica is full, gone, dead or wrong.

the try ended with                    then
RESOURCE_EXHAUSTED                    a few more tries at the same replica: it was not full by our count
no connection, or going away          another replica, also one that is just coming back
an answer that cannot be right        another replica, and the monitor looks at this one at once
the replica's death                   the call is a suspect (`core.suspects`): once more, alone; with one replica
                                      only it fails, and is tried alone when it comes again
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import grpc

from appliance.core.access import CREDENTIALS
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target
from appliance.core.suspects import Standing
from appliance.drivers.grpcserver import STATUS
from appliance.drivers.http2 import INTERNAL, CallFailed, Exchange
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue
from appliance.multiplexer.metering import CallRecord, Metering
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.suspicion import Suspicion, digest_of
from appliance.wire.envelope import INSTANCE_KEY, MODEL_KEY, RETRY_KEY
from appliance.wire.methods import Method

# Ours to read, or the transport's to set: everything else of the caller's metadata goes along.
OWN_METADATA = {INSTANCE_KEY, MODEL_KEY, *CREDENTIALS, "user-agent", "content-type", "te"}
LONGEST_WAIT_SECS = 10**7  # grpc reports "no deadline" as some centuries
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
LOOK_SECS = 60.0  # a waiting thread that wakes up to look at the clock takes a turn from one that has work
OVERLOADED = "overloaded"  # in TEI's words for a call over its max_concurrent_requests
OVERLOADED_PAUSES = (0.005, 0.02, 0.05, 0.1)  # seconds
# An engine listens again a second after its death, TEI after some more; on a busy machine a little later.
RETURN_SECS, RETURN_POLL_SECS = 10.0, 0.05
POLLS_PER_LOOK = 10  # of those who wait for a replica; in between the pool's own look counts
SECOND_REPLICA_SECS = 3.0  # so long a suspect waits for a second replica, rather than be tried on the last one
LEASE_POLL_SECS = 0.005


class ReplicaDied(CallFailed):
    """The replica went away with the call in work."""


class WrongAnswer(CallFailed):
    """The replica's answer cannot be right."""


class Attempts:
    """timeout_secs 0: only the caller's deadline counts."""

    def __init__(self, pool: ReplicaPool, metering: Metering, timeout_secs: float) -> None:
        self.pool = pool
        self.metering = metering
        self.timeout_secs = timeout_secs

    def unary(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, call: CallRecord
    ) -> tuple[bytes, Exchange]:
        """The reply, and the exchange with the replica's metadata. A failure ends the caller's call."""
        until = time.monotonic() + RETURN_SECS
        backend = self.pick_waiting(target, context)
        with ExitStack() as permits:
            queue: AdmissionQueue | None = None
            asked_again = False
            while True:
                call.instance = backend.replica.instance
                if self.pool.queue(backend) is not queue:  # the first one, or that of another instance of the model
                    permits.close()
                    queue = self.pool.queue(backend)
                    if self.acquire_permit(queue, permits, call, context):
                        # Of this instance: the permit is of its queue.
                        backend = self.pick_waiting(Target(instance_name=call.instance), context)
                suspicion = self.pool.suspicion(backend.replica)
                with call.waiting():
                    if suspicion.standing(method.name, inner) is Standing.SUSPECT:
                        return self.try_alone(method, target, inner, context, suspicion)
                    try:
                        with self.shared_lease(target, backend, context) as backend:
                            return self.ask_and_acquit(method, backend, inner, context)
                    except CallFailed as failure:
                        if asked_again or (not failure.begun and time.monotonic() > until):
                            end_as(context, backend, failure)
                        asked_again = failure.begun
                        if not failure.begun:
                            time.sleep(LEASE_POLL_SECS)  # what is not there is not asked again and again
                        backend = self.next_replica(method, target, backend, inner, context, failure)

    def next_replica(
        self,
        method: Method,
        target: Target,
        gone: Backend,
        inner: bytes,
        context: grpc.ServicerContext,
        failure: CallFailed,
    ) -> Backend:
        """The replica to try after ``failure``. Where there is none, the caller's call ends as that one ended."""
        other: Backend | None = None
        if isinstance(failure, ReplicaDied):
            self.pool.connections.drop_idle(gone.replica)  # on an old connection it would seem to die again
        if isinstance(failure, ReplicaDied) and self.pool.ended_by_itself(gone.replica):
            self.pool.suspicion(gone.replica).suspect(method.name, [inner], gone.replica)
            other = gone if self.pool.has_others(target, gone) else None  # a suspect chooses anew, see `alone`
        elif isinstance(failure, WrongAnswer):
            self.pool.report_doubt(gone)
            other = self.pick_other_ready(target, gone)
        elif failure.code == UNAVAILABLE:
            other = self.pick_other_waiting(target, gone, context)
        if other is None or not context.is_active():
            end_as(context, gone, failure)
        return other

    def pick_waiting(self, target: Target, context: grpc.ServicerContext) -> Backend:
        """The replica for a call. While all of several are away for a moment, one that comes back is waited for.

        Raises: Problem, of one replica at once.
        """
        until = time.monotonic() + RETURN_SECS
        for poll in itertools.count():
            try:
                return self.pool.pick(target, look=poll % POLLS_PER_LOOK == 0)
            except Problem as problem:
                left = time_left(context)
                late = time.monotonic() > until or (left is not None and left <= 0) or not context.is_active()
                if problem.kind is not Kind.UNAVAILABLE or late or not self.pool.comes_back(target, RETURN_SECS):
                    raise
            time.sleep(RETURN_POLL_SECS)
        raise AssertionError  # not reached

    def pick_other_ready(self, target: Target, backend: Backend) -> Backend | None:
        """Another replica that is ready now."""
        try:
            return self.pool.pick(target, without=(backend,))
        except Problem:
            return None

    def acquire_permit(
        self, queue: AdmissionQueue, permits: ExitStack, call: CallRecord, context: grpc.ServicerContext
    ) -> bool:
        """Put a permit of the queue into ``permits``; whether it had to be waited for. Raises as `single_permit`."""
        before = call.waited_secs
        try:
            with call.waiting():
                return permits.enter_context(queue.single_permit(time_left(context), context.add_callback))
        finally:
            self.metering.meters.waits.observe(call.waited_secs - before)

    # -- with other calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def shared_lease(self, target: Target, backend: Backend, context: grpc.ServicerContext) -> Iterator[Backend]:
        """The backend or, while somebody has that alone, another one, beside other calls. Raises: Problem."""
        leases = self.pool.leases
        while not leases.acquire(backend.replica, exclusive=False):
            left = time_left(context)
            if left is not None and left <= 0:
                raise Problem(Kind.TIMEOUT, "TIMEOUT", "The deadline passed before a replica was free")
            if not context.is_active():
                raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
            time.sleep(LEASE_POLL_SECS)
            backend = self.pick_waiting(target, context)  # the call that had it alone may have ended it
        try:
            yield backend
        finally:
            leases.release(backend.replica, exclusive=False)

    def ask_and_acquit(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext
    ) -> tuple[bytes, Exchange]:
        reply_and_exchange = self.ask_repeatedly(method, backend, inner, context)
        self.pool.suspicion(backend.replica).answered(method.name)
        return reply_and_exchange

    def pick_other_waiting(self, target: Target, gone: Backend, context: grpc.ServicerContext) -> Backend | None:
        """A replica in place of one that is not to be reached, if need be one that is coming back just now."""
        until = time.monotonic() + RETURN_SECS
        self.pool.follow()
        while context.is_active():
            try:
                return self.pool.pick(target, without=(gone,))
            except Problem:
                if not self.pool.has_others(target, gone) or time.monotonic() > until:
                    break
            time.sleep(RETURN_POLL_SECS)
        return None

    # -- alone --------------------------------------------------------------------------------------------------------

    def try_alone(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, suspicion: Suspicion
    ) -> tuple[bytes, Exchange]:
        """A suspect's one more try. Raises: Problem; Convicted when the replica dies again."""
        until, second_replica_until = trial_limits(context)
        with suspicion.trial(until, context.is_active):
            suspicion.standing(method.name, inner)  # its like may have been convicted meanwhile
            while True:
                with self.pool.exclusive_lease(target, until, second_replica_until, context.is_active) as backend:
                    # An old connection may have ended before this call.
                    self.pool.connections.drop_idle(backend.replica)
                    try:
                        reply_and_exchange = self.ask_repeatedly(method, backend, inner, context, alone=True)
                    except ReplicaDied:
                        digest = digest_of(method.name, inner)
                        if self.pool.ended_by_itself(backend.replica) and (
                            convicted := suspicion.died_alone(method.name, digest, backend.replica)
                        ):
                            raise convicted from None
                        continue
                    except CallFailed as failure:
                        if failure.begun or time.monotonic() > until:
                            end_as(context, backend, failure)
                        time.sleep(RETURN_POLL_SECS)  # it was never reached
                        continue
                suspicion.answered(method.name, inner)
                return reply_and_exchange

    # -- one try ------------------------------------------------------------------------------------------------------

    def ask_repeatedly(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext, alone: bool = False
    ) -> tuple[bytes, Exchange]:
        """One try, and some more while the replica says that it is full: it was not by our count. Raises: CallFailed.

        A replica may answer a text a moment before it counts itself as free, and the monitor asks it, too.
        """
        for pause in OVERLOADED_PAUSES:
            try:
                return self.ask(method, backend, inner, context, alone)
            except CallFailed as failure:
                if failure.code != EXHAUSTED or not context.is_active():
                    raise
            time.sleep(pause)
        try:
            return self.ask(method, backend, inner, context, alone)
        except CallFailed as failure:
            full = failure.code == EXHAUSTED and OVERLOADED in failure.details
            if full and not any(key == RETRY_KEY for key, _ in failure.trailing):
                failure.trailing.append((RETRY_KEY, str(self.pool.queue(backend).retry_after_ms())))
            raise

    def ask(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext, alone: bool
    ) -> tuple[bytes, Exchange]:
        """One try at one replica. Raises: CallFailed, as ReplicaDied or WrongAnswer where that is so."""
        limit = self.seconds_allowed(context)
        deadline = None if limit is None else time.monotonic() + limit
        timeout = () if limit is None else (("grpc-timeout", timeout_header(limit)),)
        metadata = [*forwarded_metadata(context), *timeout]

        def check() -> float:
            left = LOOK_SECS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise CallFailed(DEADLINE, f"No answer from the replica within {limit:.3g} s", [], answered=True)
            return min(left, LOOK_SECS)

        def note_abandoned() -> None:
            backend.abandon(digest_of(method.name, inner), method.name, alone)

        with (
            backend.holding(1),
            self.pool.connection(backend) as connection,
            deaths_recognized(backend, context, note_abandoned),
        ):
            exchange = connection.begin(method.path, (inner,), metadata)
            if not context.add_callback(lambda: connection.abort(exchange)):
                connection.abort(exchange)
            replies = list(connection.replies(exchange, check))
        exchange.headers.append((INSTANCE_KEY, backend.replica.instance))
        if len(replies) != 1:
            raise WrongAnswer(INTERNAL, f"{len(replies)} replies to one request", [], answered=False)
        if wrong := self.pool.flaw(backend, method.name, inner, replies[0]):
            raise WrongAnswer(INTERNAL, f"its answer cannot be right: {wrong}", [], answered=False)
        return replies[0], exchange

    def seconds_allowed(self, context: grpc.ServicerContext) -> float | None:
        """Seconds a unary call may still take: the caller's deadline and ours, whichever is nearer."""
        limits = [limit for limit in (time_left(context), self.timeout_secs or None) if limit is not None]
        return min(limits, default=None)


@contextmanager
def deaths_recognized(
    backend: Backend, context: grpc.ServicerContext, note_abandoned: Callable[[], None]
) -> Iterator[None]:
    """A connection that breaks in the middle of a call is a death, unless we or the caller have ended it.

    note_abandoned: called for one that has been ended, and at which the replica may still be at work.
    """
    try:
        yield
    except CallFailed as failure:
        if not failure.begun or backend.is_cut:
            raise
        lost = failure.code == UNAVAILABLE and not failure.answered
        if lost and context.is_active():
            raise ReplicaDied(failure.code, failure.details, failure.trailing, answered=False) from failure
        if lost or failure.code == DEADLINE:
            note_abandoned()
        raise


def trial_limits(context: grpc.ServicerContext) -> tuple[float, float]:
    """Until when a suspect may be tried again, and until when not on the last replica; of time.monotonic."""
    left = time_left(context)
    longest = LOOK_SECS if left is None else left
    return time.monotonic() + longest, time.monotonic() + min(SECOND_REPLICA_SECS, longest / 2)


def time_left(context: grpc.ServicerContext) -> float | None:
    """Seconds to the caller's deadline; None where there is none."""
    remaining = context.time_remaining()
    return remaining if remaining is not None and remaining < LONGEST_WAIT_SECS else None


def timeout_header(seconds: float) -> str:
    """grpc-timeout: at most eight digits and a unit; rounded up, so that our own deadline is the one that is met."""
    milliseconds = math.ceil(seconds * 1000) + 1
    return f"{milliseconds}m" if milliseconds < 10**8 else f"{math.ceil(seconds)}S"


def forwarded_metadata(context: grpc.ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata that concerns the replica: traces and the like."""
    return tuple(
        (key, value)
        for key, value in context.invocation_metadata()
        if key not in OWN_METADATA and not key.startswith(("grpc-", ":"))
    )


def end_as(context: grpc.ServicerContext, backend: Backend, failure: CallFailed) -> NoReturn:
    """End the caller's call as the replica's call ended. Raises: Problem of a wrong answer."""
    details, replica = failure.details, backend.replica
    if isinstance(failure, WrongAnswer):
        raise wrong_answer(backend, details)
    if not failure.answered:
        details = f'Replica {replica.index} of "{replica.instance}" does not answer, see its logs: {details}'
    if failure.trailing:
        context.set_trailing_metadata(failure.trailing)
    context.abort(STATUS.get(failure.code, grpc.StatusCode.UNKNOWN), details)
    raise AssertionError  # not reached: abort raises, which grpc does not declare


def wrong_answer(backend: Backend, why: object) -> Problem:
    replica = backend.replica
    words = f'Replica {replica.index} of "{replica.instance}" answered, but {why}'
    return Problem(Kind.INTERNAL, "WRONG_ANSWER", words)
