"""One relayed client stream at its replicas: what a replica did not answer before it went away is sent to another.

Messages that were in work when a replica died are suspects (`core.suspects`): they are sent again one at a time, to a
replica that takes no other call of ours meanwhile; then the stream goes on as before. The message with which that
replica dies as well is convicted, and ends the stream. Every reply is looked at: one that cannot be right, or a success
that leaves messages without a reply, is asked of another replica once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import grpc

from appliance.core import routing
from appliance.drivers.tei import Backend
from appliance.multiplexer.attempts import Attempts, forwarded_metadata, time_left, trial_limits, wrong_answer
from appliance.multiplexer.resend_buffer import Flawed, ResendBuffer
from appliance.multiplexer.stream_progress import Watchdog
from appliance.multiplexer.suspicion import digest_of
from appliance.wire.methods import Method

# What grpc says itself when a peer is gone (1.85); every other text is TEI's own and passes unchanged.
TRANSPORT = re.compile(
    r"(Socket closed|recvmsg|sendmsg|failed to connect|ipv[46]:|Connection|Stream removed|GOAWAY)", re.I
)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CONNECT_SECS = 1.0  # for the channel of a replica whose port is open


class StrangerAnswered(Exception):
    """Somebody else has answered."""


def proved_replies(replies: Iterator[bytes], backend: Backend) -> Iterator[bytes]:
    """The replies of a call. Raises: StrangerAnswered before the first one, where it is not the replica's.

    A channel that has just lost its connection makes another one for a call, to whoever has the port by then; so it is
    looked again who listens, when the connection is there.
    """
    for number, reply in enumerate(replies):
        if number == 0 and not backend.proved():
            raise StrangerAnswered
        yield reply


class Streams:
    """timeout_secs: how long a replica may owe an answer (0: for ever)."""

    def __init__(self, attempts: Attempts, timeout_secs: float) -> None:
        self.attempts = attempts
        self.pool = attempts.pool
        self.timeout_secs = timeout_secs
        self.watchdog = Watchdog(timeout_secs)

    def replies(self, method: Method, buffer: ResendBuffer, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The replies in order. A failure ends the caller's call."""
        backend = self.attempts.pick_waiting(buffer.target, context)
        spared = -1  # answers at which a replica failed: failing again without one more is the end
        with ExitStack() as lease:  # of a replica, for as long as suspects are in work there
            while True:
                call = self.open(method, backend, buffer, context)
                generation = backend.generation
                try:
                    with self.watchdog.watching(buffer.progress):
                        for reply in buffer.answers(proved_replies(call, backend)):
                            if not buffer.suspects:
                                lease.close()
                            yield reply
                    # A bad message may be noticed after the replica's last answer.
                    buffer.raise_problem(self.timeout_secs)
                    buffer.refuse_missing()
                    if trailing := call.trailing_metadata():
                        context.set_trailing_metadata(trailing)
                    return
                except StrangerAnswered:
                    call.cancel()
                    buffer.detach()
                    more = not buffer.suspects  # they would not be alone at the next
                    other = self.attempts.pick_other_waiting(buffer.target, backend, context) if more else None
                    if other is None or buffer.answered == spared:
                        raise routing.none_ready([backend.replica]) from None
                except Flawed as flawed:
                    call.cancel()
                    self.pool.report_doubt(backend)
                    other = self.attempts.pick_other_ready(buffer.target, backend)
                    if other is None or buffer.answered == spared or buffer.suspects:
                        raise wrong_answer(backend, flawed) from None
                except (grpc.RpcError, grpc.FutureCancelledError):
                    buffer.detach()  # whoever waits to have the replica alone must not wait for this call
                    buffer.raise_problem(self.timeout_secs)
                    if buffer.unanswered and self.died(call, backend, context):
                        backend.lost(generation)
                        other = self.replica_for_suspects(buffer, backend, call, context, lease)
                    else:
                        strange = not backend.proved()  # then these are not the words of the replica
                        gone = call.code() is UNAVAILABLE or backend.is_cut or strange
                        more = gone and not buffer.suspects  # they would not be alone at the next
                        other = self.attempts.pick_other_waiting(buffer.target, backend, context) if more else None
                        if other is None or buffer.answered == spared:
                            if strange and not backend.is_cut:
                                raise routing.none_ready([backend.replica]) from None
                            pass_on(context, backend, call)
                finally:
                    buffer.detach()
                spared, backend = buffer.answered, other

    def open(self, method: Method, backend: Backend, buffer: ResendBuffer, context: grpc.ServicerContext) -> Any:
        """A call at the backend. Raises: Problem when it cannot be reached."""
        if not backend.connected(CONNECT_SECS):
            raise routing.none_ready([backend.replica])
        messages = buffer.attach(backend, self.pool)
        start = backend.method(method.path, many_requests=True, many_replies=True)
        call = start(messages, timeout=time_left(context), metadata=forwarded_metadata(context))
        buffer.progress.cancel = call.cancel
        if buffer.problem:  # noticed before there was a call to cancel
            call.cancel()
        if not context.add_callback(call.cancel):  # a caller that leaves ends the replica's call, too
            call.cancel()
        return call

    def died(self, call: Any, backend: Backend, context: grpc.ServicerContext) -> bool:
        lost = call.code() is UNAVAILABLE and TRANSPORT.match(call.details() or "")
        by_us = backend.is_cut or not context.is_active()
        return bool(lost) and not by_us and self.pool.ended_by_itself(backend.replica)

    def replica_for_suspects(
        self, buffer: ResendBuffer, gone: Backend, call: Any, context: grpc.ServicerContext, lease: ExitStack
    ) -> Backend:
        """The replica on which the messages that were in work are tried again. Raises: Problem; Convicted."""
        suspicion = self.pool.suspicion(gone.replica)
        if buffer.suspects:
            digest = digest_of(buffer.method, buffer.unanswered[0])
            if convicted := suspicion.died_alone(buffer.method, digest, gone.replica):
                raise convicted
            lease.close()
        in_work = list(buffer.unanswered)[1:] if buffer.suspects else list(buffer.unanswered)
        suspicion.suspect(buffer.method, in_work, gone.replica)
        if not self.pool.has_others(buffer.target, gone):
            pass_on(context, gone, call)
        until, second_replica_until = trial_limits(context)
        lease.enter_context(suspicion.trial(until, context.is_active))
        backend = lease.enter_context(
            self.pool.exclusive_lease(buffer.target, until, second_replica_until, context.is_active)
        )
        buffer.suspects = len(buffer.unanswered)
        buffer.end_trial = lease.close  # where the caller does not read, others need the replica
        return backend


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
