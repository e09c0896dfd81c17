"""One relayed client stream at its replicas: what a replica did not answer before it went away is sent to another.

Messages that were in work when a replica died are suspects (`core.suspects`): they are sent again one at a time, to a
replica that takes no other call of ours meanwhile; then the stream goes on as before. The message with which that
replica dies as well is convicted, and ends the stream. Every reply is looked at: one that cannot be right, or a success
that leaves messages without a reply, is asked of another replica once.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from typing import NoReturn

import grpc

from appliance.core import routing
from appliance.core.problems import Kind, Problem, quoted
from appliance.drivers.grpccalls import deadline_check
from appliance.drivers.http2 import Connection, MessageStream
from appliance.drivers.tei import Backend
from appliance.multiplexer.attempts import Attempts
from appliance.multiplexer.batch_run import Generations
from appliance.multiplexer.caller import (
    end_as,
    metadata_for_replica,
    time_left,
    trial_limits,
    wrong_answer,
)
from appliance.multiplexer.resend_buffer import Flawed, ResendBuffer
from appliance.multiplexer.stream_progress import Watchdog
from appliance.multiplexer.suspicion import digest_of
from appliance.wire.calls import CallFailed, Code, Status
from appliance.wire.methods import Method

CONNECT_SECS, CONNECT_POLL_SECS = 1.0, 0.02  # to a replica that was ready a moment ago


class Streams:
    """timeout_secs: how long a replica may owe an answer (0: for ever)."""

    def __init__(self, attempts: Attempts, timeout_secs: float) -> None:
        self.attempts = attempts
        self.pool = attempts.pool
        self.timeout_secs = timeout_secs
        self.watchdog = Watchdog(timeout_secs)

    def replies(self, method: Method, buffer: ResendBuffer, context: grpc.ServicerContext) -> Generator[bytes]:
        """The replies in order. A failure ends the caller's call."""
        backend = self.first_backend(buffer, context)
        spared = -1  # answers at which a replica failed: failing again without one more is the end
        until: float | None = None  # but for failures of which it is innocent
        with ExitStack() as lease:  # of a replica, for as long as suspects are in work there
            while True:
                other: Backend | None
                try:
                    for reply in self.one_call(method, backend, buffer, context):
                        if not buffer.suspects:
                            lease.close()
                        yield reply
                    return
                except Flawed as flawed:
                    self.pool.report_doubt(backend)
                    other = self.attempts.pick_other_ready(buffer.target, backend)
                    if other is None or buffer.answered == spared or buffer.suspects:
                        raise wrong_answer(backend, flawed) from None
                except CallFailed as failure:
                    buffer.raise_problem(self.timeout_secs)
                    failure = as_the_caller_sees_it(failure, backend, context)
                    was_idle = buffer.is_idle and (failure.server_ends or backend.is_cut)
                    if was_idle:
                        # No replica is asked for, and none is woken, until there is something to ask.
                        if not buffer.read_one():
                            return
                        self.pool.connections.drop_idle(backend.replica)  # those of the process that is gone
                        spared, until = -1, None
                    if buffer.unanswered and self.died(failure, backend, context):
                        other = self.replica_for_suspects(buffer, backend, failure, context, lease)
                    else:
                        until = until or self.attempts.waits_until(context)
                        is_innocent = was_idle or self.attempts.is_innocent(failure, backend)
                        other = self.replica_after(failure, backend, buffer, context, is_innocent)
                        was_asked = not is_innocent or time.monotonic() > until
                        if other is None or (was_asked and buffer.answered == spared):
                            self.end(failure, backend, context)
                self.refuse_other_instance(buffer, other, self.pool.generations(buffer.target))
                spared, backend = buffer.answered, other

    def first_backend(self, buffer: ResendBuffer, context: grpc.ServicerContext) -> Backend:
        """Raises: Problem."""
        while True:
            generations = self.pool.generations(buffer.target)
            backend = self.attempts.pick_waiting(buffer.target, context)
            # Else the replica may be of either, and it cannot be said which generation the stream is of.
            if not buffer.whole.is_asked_for or generations == self.pool.generations(buffer.target):
                self.refuse_other_instance(buffer, backend, generations)
                return backend

    def refuse_other_instance(self, buffer: ResendBuffer, backend: Backend, generations: Generations) -> None:
        """The first message decides which instances answer a stream. An index, an alias or a model's id may come to
        name others; and an instance another model, where all replies are to be of one. generations: among which the
        replica was picked. Raises: Problem REPLACED."""
        buffer.whole.begin(buffer.target, generations)
        name = backend.replica.instance
        if not buffer.instances:
            buffer.instances = frozenset({name, *(each for each, _ in generations)})
        if name not in buffer.instances:
            words = f"{buffer.target} names {quoted(name)} now, another one answered so far: begin a new stream"
            raise Problem(Kind.CONFLICT, "REPLACED", words)

    def one_call(
        self, method: Method, backend: Backend, buffer: ResendBuffer, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The replies of one replica, to its end. Raises: CallFailed, Flawed, Problem; the call is over then."""
        with ExitStack() as call:
            connection = self.connect(backend, call)
            messages = buffer.attach(backend, self.pool)
            # Whoever waits to have the replica alone must not wait for a call that is over.
            call.callback(buffer.detach)
            seconds = time_left(context)
            metadata = metadata_for_replica(context, seconds, backend.replica.is_peer)
            stream = MessageStream(connection, method.path, messages, metadata)
            call.enter_context(backend.ending_with(stream.cancel))
            call.enter_context(self.watchdog.watching(buffer.progress))
            buffer.progress.cancel = stream.cancel
            # A problem may have been noticed, and the caller may have left, before there was a call to cancel.
            if buffer.problem or not context.add_callback(stream.cancel):
                stream.cancel()
            check = deadline_check(seconds, "Deadline Exceeded")
            yield from buffer.answers(call.enter_context(closing(stream.replies(check))))
            buffer.raise_problem(self.timeout_secs)  # a bad message may be noticed after the replica's last answer
            buffer.refuse_missing()
            if stream.call.status and stream.call.status.trailers:
                context.set_trailing_metadata(stream.call.status.trailers)

    def connect(self, backend: Backend, call: ExitStack) -> Connection:
        """A connection for as long as ``call`` lasts. Raises: CallFailed when the replica cannot be reached in time."""
        until = time.monotonic() + CONNECT_SECS
        while not backend.is_cut and time.monotonic() < until:
            with ExitStack() as attempt:
                try:
                    connection = attempt.enter_context(self.pool.connection(backend))
                    connection.wait_for_greeting(CONNECT_SECS)  # a dying replica accepts a connection, and ends it
                except (CallFailed, OSError):
                    time.sleep(CONNECT_POLL_SECS)
                else:
                    call.enter_context(attempt.pop_all())
                    return connection
        words = routing.none_ready([backend.replica]).message
        raise CallFailed(Status(Code.UNAVAILABLE, words), answered=False, begun=False)

    def died(self, failure: CallFailed, backend: Backend, context: grpc.ServicerContext) -> bool:
        lost = failure.status.code == Code.UNAVAILABLE and not failure.answered and failure.begun
        by_us = backend.is_cut or not context.is_active()
        return lost and not by_us and self.pool.ended_by_itself(backend.replica)

    def replica_after(
        self,
        failure: CallFailed,
        gone: Backend,
        buffer: ResendBuffer,
        context: grpc.ServicerContext,
        is_innocent: bool,
    ) -> Backend | None:
        """Another replica where ``gone`` is not there any more, and no suspects are in work that have to be alone.
        is_innocent: see `Attempts`."""
        is_gone = failure.server_ends or gone.is_cut
        return (
            self.attempts.pick_other_waiting(buffer.target, gone, context, or_itself=is_innocent)
            if is_gone and not buffer.suspects
            else None
        )

    def end(self, failure: CallFailed, backend: Backend, context: grpc.ServicerContext) -> NoReturn:
        """End the caller's call as the replica's call ended. Raises: Problem when no replica listens any more."""
        if not failure.answered and not backend.is_cut and not backend.is_proved():
            raise routing.none_ready([backend.replica]) from None
        end_as(context, backend, failure)

    def replica_for_suspects(
        self,
        buffer: ResendBuffer,
        gone: Backend,
        failure: CallFailed,
        context: grpc.ServicerContext,
        lease: ExitStack,
    ) -> Backend:
        """The replica on which the messages that were in work are tried again. Raises: Problem; Convicted."""
        self.pool.connections.drop_idle(gone.replica)  # on an old connection it would seem to die again
        suspicion = self.pool.suspicion(gone.replica)
        if buffer.suspects:
            digest = digest_of(buffer.method, buffer.unanswered[0])
            if convicted := suspicion.died_alone(buffer.method, digest, gone.replica):
                raise convicted
            lease.close()
        in_work = list(buffer.unanswered)[1:] if buffer.suspects else list(buffer.unanswered)
        suspicion.suspect(buffer.method, in_work, gone.replica)
        if not self.pool.has_others(buffer.target, gone):
            end_as(context, gone, failure)
        until, second_replica_until = trial_limits(context)
        lease.enter_context(suspicion.trial(until, context.is_active))
        backend = lease.enter_context(
            self.pool.exclusive_lease(buffer.target, until, second_replica_until, context.is_active)
        )
        self.pool.connections.drop_idle(backend.replica)  # an old one may have ended before this call
        buffer.suspects = len(buffer.unanswered)
        buffer.end_trial = lease.close  # where the caller does not read, others need the replica
        return backend


def as_the_caller_sees_it(failure: CallFailed, backend: Backend, context: grpc.ServicerContext) -> CallFailed:
    """A connection that this side has ended is no failure of the replica."""
    code, _, trailers = failure.status
    if backend.is_cut:
        status = Status(Code.UNAVAILABLE, "Connection ended, because it is withheld", trailers)
        return CallFailed(status, answered=False)
    if code == Code.UNAVAILABLE and not failure.answered and not context.is_active():
        return CallFailed(Status(Code.CANCELLED, "The caller is gone"), answered=True)
    return failure
