"""One unary call at its replicas: the first try, and what follows when a replica is full, gone, dead or wrong.

the try ended with                    then
RESOURCE_EXHAUSTED                    a few more tries at the same replica: it was not full by our count
no connection, or going away          another replica, or one that is just coming back, itself included
an answer that cannot be right        another replica, and the monitor looks at this one at once
the replica's death                   the call is a suspect (`core.suspects`): once more, alone; with one replica
                                      only it fails, and is tried alone when it comes again
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc

from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica, Target
from appliance.core.suspects import Standing
from appliance.drivers.grpccalls import deadline_check
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue, SinglePermit
from appliance.multiplexer.arrivals import RETURN_SECS, Limits
from appliance.multiplexer.caller import (
    ReplicaDied,
    WrongAnswer,
    end_as,
    is_full,
    metadata_for_replica,
    time_left,
    trial_limits,
)
from appliance.multiplexer.cooperation import WouldBlock, looking
from appliance.multiplexer.joined_call import may_block, scheduler_of
from appliance.multiplexer.metering import CallRecord, Metering
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.suspicion import Suspicion, digest_of
from appliance.wire.calls import CallFailed, ClientCall, Code, Metadata, Status
from appliance.wire.envelope import CACHE_KEY, DO_NOT_WAIT, FINGERPRINT_KEY, INSTANCE_KEY, RETRY_KEY, WAIT_KEY
from appliance.wire.methods import Method

OVERLOADED_PAUSES = (0.005, 0.02, 0.05, 0.1)  # seconds
RETURN_POLL_SECS = 0.05
LEASE_POLL_SECS = 0.005
INFO = "Info"


class UnaryReply(NamedTuple):
    """A reply: its message, and its metadata before and behind it. replica: None for one of the cache."""

    message: bytes
    headers: Metadata
    trailers: Sequence[tuple[str, str | bytes]]
    replica: Replica | None = None


class Attempts:
    """timeout_secs 0: only the caller's deadline counts."""

    def __init__(self, pool: ReplicaPool, metering: Metering, timeout_secs: float) -> None:
        self.pool = pool
        self.metering = metering
        self.timeout_secs = timeout_secs

    def unary(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, call: CallRecord
    ) -> UnaryReply:
        """The reply of a replica. A failure ends the caller's call."""
        until: float | None = None
        backend = self.pick_waiting(target, context)
        with SinglePermit() as permit:
            asked_again = False
            while True:
                call.instance = backend.replica.instance
                queue = self.pool.queue(backend)
                # The first one, or that of another instance of the model.
                if queue is not permit.queue and self.acquire_permit(queue, permit, call, context):
                    # Of this instance: the permit is of its queue.
                    backend = self.pick_waiting(Target(instance_name=call.instance, here=target.here), context)
                suspicion = self.pool.suspicion(backend.replica)
                with call.waiting():
                    if suspicion.standing(method.name, inner) is Standing.SUSPECT:
                        may_block(context)
                        return self.try_alone(method, target, inner, context, suspicion)
                    try:
                        backend = self.lease_shared(target, backend, context)
                        try:
                            return self.ask_and_acquit(method, backend, inner, context)
                        finally:
                            self.pool.leases.release(backend.replica, exclusive=False)
                    except CallFailed as failure:
                        until = until or self.waits_until(context)
                        is_innocent = self.is_innocent(failure, backend)
                        if asked_again or (is_innocent and time.monotonic() > until):
                            end_as(context, backend, failure)
                        asked_again = not is_innocent
                        if is_innocent:
                            may_block(context)
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
            may_block(context)
            other = self.pick_other_ready(target, gone)
        elif failure.server_ends:
            may_block(context)
            other = self.pick_other_waiting(target, gone, context, or_itself=self.is_innocent(failure, gone))
        if other is None or not context.is_active():
            end_as(context, gone, failure)
        return other

    def is_innocent(self, failure: CallFailed, gone: Backend) -> bool:
        """Whether the call cannot have ended the replica: the next process may be asked, as often as time allows."""
        is_lost = failure.server_ends and not failure.answered
        return not failure.begun or (is_lost and not self.pool.ended_by_itself(gone.replica))

    def pick_waiting(self, target: Target, context: grpc.ServicerContext) -> Backend:
        """The replica for a call, if need be one that is on its way. Raises: Problem."""
        choose = looking(scheduler_of(context), lambda look: self.pool.pick(target, look=look))
        return self.pool.arrivals.until_ready(target, choose, lambda: self.limits(context))

    def limits(self, context: grpc.ServicerContext) -> Limits:
        """For how long a call waits for a replica."""
        may_block(context)
        if (WAIT_KEY, DO_NOT_WAIT) in context.invocation_metadata():
            return Limits(time.monotonic(), context.is_active)
        allowed = self.seconds_allowed(context)
        return Limits(math.inf if allowed is None else time.monotonic() + allowed, context.is_active)

    def pick_other_ready(self, target: Target, backend: Backend) -> Backend | None:
        """Another replica that is ready now."""
        try:
            return self.pool.pick(target, without=(backend,))
        except Problem:
            return None

    def acquire_permit(
        self, queue: AdmissionQueue, permit: SinglePermit, call: CallRecord, context: grpc.ServicerContext
    ) -> bool:
        """Make ``permit`` one of the queue; whether it had to be waited for. Raises as `acquire_single`."""
        if scheduler_of(context):
            if not permit.try_acquire(queue):
                raise WouldBlock
            call.found_room += 1
            return False
        before = call.waited_secs
        try:
            with call.waiting():
                return permit.acquire(queue, time_left(context), context.add_callback)
        finally:
            self.metering.meters.waits.observe(call.waited_secs - before)

    # -- with other calls ---------------------------------------------------------------------------------------------

    def lease_shared(self, target: Target, backend: Backend, context: grpc.ServicerContext) -> Backend:
        """The backend or, while another call has that alone, another one, beside other calls. Raises: Problem.

        Whoever asks releases the lease.
        """
        while not self.pool.leases.acquire(backend.replica, exclusive=False):
            may_block(context)
            left = time_left(context)
            if left is not None and left <= 0:
                raise Problem(Kind.TIMEOUT, "TIMEOUT", "The deadline passed before a replica was free")
            if not context.is_active():
                raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
            time.sleep(LEASE_POLL_SECS)
            backend = self.pick_waiting(target, context)  # the call that had it alone may have ended it
        return backend

    def ask_and_acquit(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext
    ) -> UnaryReply:
        reply = self.ask_repeatedly(method, backend, inner, context)
        self.pool.suspicion(backend.replica).answered(method.name)
        return reply

    def pick_other_waiting(
        self, target: Target, gone: Backend, context: grpc.ServicerContext, or_itself: bool
    ) -> Backend | None:
        """A replica in place of one that is not to be reached, if need be one that is coming back just now.

        or_itself: that one, too, because it was not the call that has ended it.
        """
        self.pool.follow()

        def choose(look: bool) -> Backend:
            try:
                return self.pool.pick(target, without=(gone,), look=look)
            except Problem:
                if or_itself:
                    return self.pool.pick(target, look=look)
                if self.pool.has_others(target, gone):
                    raise
                raise Problem(Kind.NOT_FOUND, "NO_OTHER_REPLICA", "There is no other replica") from None

        try:
            return self.pool.arrivals.until_ready(target, choose, lambda: self.limits(context))
        except Problem:
            return None

    def waits_until(self, context: grpc.ServicerContext) -> float:
        """Until when a call waits for a replica that is coming back: its deadline, or ours; of time.monotonic."""
        allowed = self.seconds_allowed(context)
        return time.monotonic() + (RETURN_SECS if allowed is None else allowed)

    # -- alone --------------------------------------------------------------------------------------------------------

    def try_alone(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, suspicion: Suspicion
    ) -> UnaryReply:
        """A suspect's one more try. Raises: Problem; Convicted when the replica dies again."""
        until, second_replica_until = trial_limits(context)
        with suspicion.trial(until, context.is_active):
            suspicion.standing(method.name, inner)  # its like may have been convicted meanwhile
            while True:
                with self.pool.exclusive_lease(target, until, second_replica_until, context.is_active) as backend:
                    # An old connection may have ended before this call.
                    self.pool.connections.drop_idle(backend.replica)
                    try:
                        reply = self.ask_repeatedly(method, backend, inner, context, alone=True)
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
                return reply

    # -- one try ------------------------------------------------------------------------------------------------------

    def ask_repeatedly(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext, alone: bool = False
    ) -> UnaryReply:
        """One try, and some more while the replica says that it is full: it was not by our count. Raises: CallFailed.

        A replica may answer a text a moment before it counts itself as free, and the monitor asks it, too.
        """
        for pause in self.overloaded_pauses(backend, context):
            try:
                return self.ask(method, backend, inner, context, alone)
            except CallFailed as failure:
                if not is_full(failure) or not context.is_active():
                    raise
            may_block(context)
            time.sleep(pause)
        try:
            return self.ask(method, backend, inner, context, alone)
        except CallFailed as failure:
            code, details, trailers = failure.status
            if not is_full(failure) or any(key == RETRY_KEY for key, _ in trailers):
                raise
            retry = (RETRY_KEY, str(self.pool.queue(backend).retry_after_ms()))
            raise CallFailed(Status(code, details, [*trailers, retry]), failure.answered) from failure

    def overloaded_pauses(self, backend: Backend, context: grpc.ServicerContext) -> Iterator[float]:
        """The pauses between tries, in seconds: as long as the call may take where others fill the replica, too."""
        yield from OVERLOADED_PAUSES
        until = self.waits_until(context)
        while self.pool.is_shared(backend.replica.instance) and time.monotonic() < until:
            yield OVERLOADED_PAUSES[-1]

    def ask(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext, alone: bool
    ) -> UnaryReply:
        """One try at one replica. Raises: CallFailed, as ReplicaDied or WrongAnswer where that is so."""
        backend.take(1, is_use=method.name != INFO)
        try:
            call, messages = self.exchange(method, backend, inner, context)
        except CallFailed as failure:
            if abandons(failure, backend, context):
                backend.abandon(digest_of(method.name, inner), method.name, alone)
            raise
        finally:
            backend.take(-1)
        if len(messages) != 1:
            raise WrongAnswer(Status(Code.INTERNAL, f"{len(messages)} replies to one request"), answered=False)
        if wrong := self.pool.flaw(backend, method.name, inner, messages[0]):
            raise WrongAnswer(Status(Code.INTERNAL, f"its answer cannot be right: {wrong}"), answered=False)
        # An appliance says these of itself. What it computes with only a peer knows.
        ours = {INSTANCE_KEY, CACHE_KEY} if backend.replica.is_peer else {INSTANCE_KEY, CACHE_KEY, FINGERPRINT_KEY}
        headers = [(key, value) for key, value in call.headers if key not in ours]
        headers.append((INSTANCE_KEY, backend.replica.instance))
        return UnaryReply(messages[0], headers, call.status.trailers if call.status else (), backend.replica)

    def exchange(
        self, method: Method, backend: Backend, inner: bytes, context: grpc.ServicerContext
    ) -> tuple[ClientCall, list[bytes]]:
        """A call at a replica, with all of its replies. Raises: CallFailed."""
        limit = self.seconds_allowed(context)
        metadata = metadata_for_replica(context, limit, backend.replica.is_peer)
        check = deadline_check(limit, "Request timeout: no answer from the replica within {:.3g} s")
        scheduler = scheduler_of(context)
        connection = self.pool.acquire_connection(backend, may_wait=scheduler is None)
        try:
            call = connection.begin(method.path, (inner,), metadata)
            if not context.add_callback(lambda: connection.abort(call)):
                connection.abort(call)
            return call, list(connection.replies(call, check, scheduler.wait if scheduler else None))
        finally:
            self.pool.connections.release(backend.replica, connection)

    def seconds_allowed(self, context: grpc.ServicerContext) -> float | None:
        """Seconds a unary call may still take: the caller's deadline and ours, whichever is nearer."""
        limits = [limit for limit in (time_left(context), self.timeout_secs or None) if limit is not None]
        return min(limits, default=None)


def abandons(failure: CallFailed, backend: Backend, context: grpc.ServicerContext) -> bool:
    """Whether the replica may still be at work at a call that has been ended by us or by the caller.

    Raises: ReplicaDied when the connection broke in the middle of the call, and nobody has ended it.
    """
    if not failure.begun or backend.is_cut:
        return False
    lost = failure.status.code == Code.UNAVAILABLE and not failure.answered
    if lost and context.is_active():
        raise ReplicaDied(failure.status, answered=False) from failure
    return lost or failure.status.code == Code.DEADLINE_EXCEEDED
