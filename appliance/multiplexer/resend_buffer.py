"""The messages of one client stream on their way to a replica, kept until they are answered.

A replica may go away in the middle: what it did not answer is then sent again, in order, to another, before the rest
of the stream. A thread of its own sends a stream, and may still be blocked on behalf of the call that died;
what that thread reads too late goes into the buffer, so that no message is lost between two calls.

A message holds a permit of the queue until its answer is on its way to the caller. The stream of a caller that takes
its answers more slowly than they come releases all its permits, and sends nothing more before the caller has caught up:
one caller that read nothing at all had stopped the batches of all others.

While messages are in work, the stream shares its replica with other calls. Suspects of having ended a replica are sent
one at a time, to a replica that their stream has alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.routing import Replica
from appliance.drivers.memory import Reservation
from appliance.drivers.tei import Backend
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.admission_queue import BULK_POLL_SECS, AdmissionQueue
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.stream_progress import StreamProgress
from appliance.multiplexer.whole_stream import WholeStream
from appliance.wire.methods import Method

LEASE_POLL_SECS = 0.005


class Flawed(Exception):
    """A reply, or the end of a stream, that cannot be right."""


class ResendBuffer:
    """One client stream. Its first message is read at once, for the target. Raises: Problem for an empty stream."""

    def __init__(
        self,
        method: Method,
        addressing: Addressing,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        reservation: Reservation,
        whole: WholeStream,
    ) -> None:
        self.whole = whole
        self.method = method.name.removesuffix("Stream")
        self.reservation = reservation
        self.addressing = addressing
        self.requests = requests
        first = next(requests, None)
        if first is None:
            raise invalid("Empty stream: send at least one message")
        self.target, inner = addressing.first(method, first, context)
        reservation.grow(len(inner), bounded=False)
        self.progress = StreamProgress(cancel=lambda: None, on_lag=self.yield_permits)
        self.problem: Problem | None = None
        self.unread = deque([inner])  # read from the client, not sent to a replica
        self.unanswered: deque[bytes] = deque()
        self.without_permit = 0  # so many of the unanswered, the first ones, hold no permit any more
        self.may_send = threading.Event()
        self.may_send.set()
        self.answered = 0
        self.finished = False  # the client has sent its last message
        self.message_count = 1
        self.instances: frozenset[str] = frozenset()  # that may answer it, from the first pick on
        self.attached = False
        self.call_number = 0  # which call the stream is attached to
        self.end_trial: Callable[[], None] = lambda: None
        self.suspects = 0  # of the messages that follow: sent one at a time
        self.has_lease = False  # a shared one, of the replica
        self.backend: Backend | None = None
        self.pool: ReplicaPool | None = None
        self.queue: AdmissionQueue | None = None
        self.reading = threading.Lock()
        self.lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be sent or answered."""
        return not (self.unanswered or self.unread)

    @property
    def replica(self) -> Replica | None:
        """To which the messages go, or went last."""
        return self.backend.replica if self.backend else None

    def attach(self, backend: Backend, pool: ReplicaPool) -> Iterator[bytes]:
        """The messages for a call to ``backend``: what was not answered yet, then what follows."""
        with self.lock:
            self.attached = True
            self.call_number += 1
            self.backend, self.pool, self.queue = backend, pool, pool.queue(backend)
            self.unread.extendleft(reversed(self.unanswered))
            self.unanswered.clear()
            return self.messages(self.call_number)

    def detach(self) -> None:
        """The call is over: its replica owes nothing any more."""
        with self.lock:
            if not self.attached:
                return
            self.attached = False
            self.call_number += 1
            self.release_permits(len(self.unanswered) - self.without_permit)
            self.without_permit = 0
            self.release_lease()
            self.progress.owed = 0
            self.resume()

    def messages(self, call_number: int) -> Iterator[bytes]:
        while True:
            try:
                inner = self.next_message(call_number)
            except Problem as problem:
                self.problem = problem
                self.progress.cancel()
                return
            if inner is None:
                self.count_end(call_number)
                return
            yield inner

    def count_end(self, call_number: int) -> None:
        """A replica that has answered everything owes the end of its answers still: it may hang instead."""
        with self.lock:
            if self.finished and self.call_number == call_number:
                self.progress.count_sent()

    def next_message(self, call_number: int) -> bytes | None:
        """The next message of the call ``call_number``; None at the end of the stream, or when that call is over.

        Raises: Convicted for one that has ended replicas.
        """
        if not self.unread and not self.read_one():
            return None
        self.refuse_convicted()
        while not self.may_send.wait(timeout=BULK_POLL_SECS):
            if self.call_number != call_number:
                return None
        queue = self.queue
        if queue is None or not queue.acquire_bulk(1, cancelled=lambda: self.call_number != call_number):
            return None
        while True:
            with self.lock:
                if self.call_number != call_number:
                    queue.release(bulk=1)
                    return None
                if self.acquire_lease():
                    return self.next_unread()
            time.sleep(LEASE_POLL_SECS)

    def refuse_convicted(self) -> None:
        """Raises: Convicted when the next message has ended replicas before."""
        if self.pool and self.backend and self.unread:
            self.pool.suspicion(self.backend.replica).standing(self.method, self.unread[0])

    def acquire_lease(self) -> bool:
        """Whether the next message may be sent: a suspect when no other is in work, all others with a shared lease.

        Under the lock.
        """
        if self.suspects:
            return not self.unanswered
        if self.has_lease and self.pool and self.backend and self.pool.leases.refuses_sharers(self.backend.replica):
            return False  # an exclusive lease is requested: what is in work is answered first
        if not self.has_lease and self.pool and self.backend:
            self.has_lease = self.pool.leases.acquire(self.backend.replica, exclusive=False)
        return self.has_lease

    def next_unread(self) -> bytes:
        """Under the lock."""
        inner = self.unread.popleft()
        self.unanswered.append(inner)
        self.progress.count_sent()
        if self.backend:
            self.backend.take(1)
        return inner

    def read_one(self) -> bool:
        """Wait for a message of the client, unless one is there by now; False at the end of the stream."""
        with self.reading:
            if self.unread:
                return True
            try:
                raw = next(self.requests, None)
            except grpc.RpcError:  # the caller is gone; the cancellation goes its own way
                return False
            if raw is None:
                self.finished = True
                return False
            inner = self.addressing.following(raw, self.target, self.message_count)
            self.reservation.grow(len(inner), bounded=False)
            self.unread.append(inner)
            self.message_count += 1
            return True

    def answers(self, replies: Iterator[bytes]) -> Iterator[bytes]:
        """The replies of a call on their way to the caller. Raises: Flawed."""
        for reply in replies:
            self.count_answer(reply)
            with self.progress.handing_over():
                yield reply
            with self.lock:
                if not self.unanswered:  # from here on the caller waits for its own next message
                    self.resume()

    def count_answer(self, reply: bytes) -> None:
        """The reply answers the oldest unanswered message. Raises: Flawed when it cannot."""
        with self.lock:
            if not self.unanswered:
                raise Flawed("it sent more replies than it got messages")
            assert self.pool
            assert self.backend
            if flaw := self.pool.flaw(self.backend, self.method, self.unanswered[0], reply):
                raise Flawed(f"its answer cannot be right: {flaw}")
            self.answered += 1
            self.progress.count_received()
            request = self.unanswered.popleft()
            self.reservation.shrink(len(request))
            if self.without_permit:
                self.without_permit -= 1
            else:
                self.release_permits(1)
            if not self.unanswered:
                self.release_lease()
            if self.pool and self.backend:
                self.pool.suspicion(self.backend.replica).answered(self.method, request if self.suspects else None)
            self.suspects = max(0, self.suspects - 1)
            if not self.progress.lag_secs:
                self.may_send.set()

    def refuse_missing(self) -> None:
        """Raises: Flawed when the replica has ended the stream before it got and answered all messages."""
        if self.unanswered or not self.finished:
            raise Flawed(f"it ended the stream with {len(self.unanswered)} of its messages unanswered")

    def yield_permits(self) -> None:
        """The caller does not take its answers: those that wait for it keep no permits from others."""
        with self.lock:
            if not self.progress.is_behind(time.monotonic()):  # not any more
                return
            self.may_send.clear()
            self.release_permits(len(self.unanswered) - self.without_permit)
            self.without_permit = len(self.unanswered)
            self.release_lease()
            if self.suspects:
                words = "A replica died with messages in work, and the caller did not read while they were tried again"
                self.problem = Problem(Kind.TIMEOUT, "TIMEOUT", words)
                self.end_trial()
                self.progress.cancel()

    def resume(self) -> None:
        """Nothing waits for the caller any more. Under the lock."""
        self.progress.lag_secs = 0.0
        self.may_send.set()

    def release_lease(self) -> None:
        """Under the lock."""
        if self.has_lease and self.pool and self.backend:
            self.pool.leases.release(self.backend.replica, exclusive=False)
        self.has_lease = False

    def release_permits(self, texts: int) -> None:
        if self.backend and self.queue and texts:
            self.backend.take(-texts)
            self.queue.release(bulk=texts)

    def raise_problem(self, timeout_secs: float) -> None:
        """Raises: Problem with which this side has ended the call, if it has."""
        if self.problem:
            raise self.problem
        if self.progress.stalled:
            message = f"No answer for {timeout_secs:g} s from the replica (grpc_request_timeout_secs)"
            raise Problem(Kind.TIMEOUT, "TIMEOUT", message)
