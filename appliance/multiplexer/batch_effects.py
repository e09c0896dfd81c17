"""What a batch run does to the world: its slices go to replicas of the pool, each on one stream, in a thread.

Nothing outlives the run: slices in flight end when it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import grpc

from appliance.core.batching import Slice
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Replica
from appliance.drivers.grpccalls import STATUS
from appliance.drivers.http2 import Wait
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue, BulkWaiter
from appliance.multiplexer.batch_run import POLL_SECS, BatchJob, Replaced, SliceOutcome, Start, TextFailure
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.suspicion import Suspicion
from appliance.multiplexer.threads import WorkerThreads
from appliance.wire import packing
from appliance.wire.calls import CallFailed, Code, Metadata, Status
from appliance.wire.envelope import CODE_KEY, LANE_KEY, SINGLE_LANE

ThreadsOf = Callable[[Backend], WorkerThreads]
EXPECT_SECS = 0.25
RELEASED_TOGETHER = 8  # permits: each release takes a lock
# The replica ended the stream, not the text: what it did not answer is computed elsewhere.
DEATHS = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


class PoolEffects:
    """`batch_run.Effects` on a pool of replicas. stall_secs: how long a replica may owe an answer (0: for ever).

    threads_of: the threads that carry slices to a replica.
    """

    def __init__(
        self,
        job: BatchJob,
        pool: ReplicaPool,
        threads_of: ThreadsOf,
        stall_secs: float,
    ) -> None:
        self.job = job
        self.pool = pool
        self.threads_of = threads_of
        self.stall_secs = stall_secs
        self.outcomes = outcomes = SimpleQueue[SliceOutcome | None]()
        # Not by way of self: a cycle would keep all texts until it is collected.
        self.waiter = BulkWaiter(lambda: outcomes.put(None))
        self.waits_in: AdmissionQueue | None = None
        self.expected, self.expected_at = False, float("-inf")  # a replica, and when that was looked at
        self.has_started = False  # some slice
        self.ended = False  # read by the slices' threads: they end at once
        self.now = time.monotonic
        self.wait: Wait | None = None  # for replies, instead of the connection itself

    def ready(self) -> list[Backend]:
        ready = self.pool.ready(self.job.target, look=self.wait is None)
        self.job.refuse_replaced(self.pool.generations(self.job.target))
        return ready

    def is_expected(self) -> bool:
        """Looked at a few times a second; what sleeps is woken by it."""
        now = time.monotonic()
        if now - self.expected_at > EXPECT_SECS:
            self.expected_at = now
            self.expected = self.pool.arrivals.arrival(self.job.target, now) is not None
        return self.expected

    def start(self, slice_: Slice, backend: Backend) -> Start:
        if not self.pool.leases.acquire(backend.replica, slice_.careful):
            return Start.NO_LEASE
        queue = self.pool.queue(backend)
        if not self.acquire(queue, len(slice_.texts)):
            self.pool.leases.release(backend.replica, slice_.careful)
            if self.job.is_combined and not self.has_started:
                raise no_room_together(queue.instance)
            if not self.job.is_combined:
                self.wait_in(queue)
            return Start.NO_PERMITS
        self.has_started = True
        backend.take(len(slice_.texts))
        call = SliceCall(self, slice_, backend, queue)
        try:
            self.carry(call, backend)
        except Problem:
            call.give_back()
            raise
        return Start.STARTED

    def carry(self, call: SliceCall, backend: Backend) -> None:
        self.threads_of(backend).begin(call.run)

    def acquire(self, queue: AdmissionQueue, texts: int) -> bool:
        """Permits, if there are some now. Those of single texts are not waited for, as each can do that alone; what has
        begun with some goes on, and looks again a little later."""
        return queue.try_acquire_singles(texts) if self.job.is_combined else queue.try_acquire_bulk(self.waiter, texts)

    def keep_waiting(self, wanted: bool) -> None:
        if not wanted:
            self.wait_in(None)

    def wait_in(self, queue: AdmissionQueue | None) -> None:
        """In this queue and no other: a waiter that wants nothing there must not hold up others."""
        if self.waits_in and self.waits_in is not queue:
            self.waits_in.withdraw(self.waiter)
        self.waits_in = queue

    def next_outcome(self, within_secs: float) -> SliceOutcome | None:
        try:
            return self.outcomes.get(timeout=within_secs)
        except Empty:
            return None

    def suspicion(self, replica: Replica) -> Suspicion:
        return self.pool.suspicion(replica)

    def ended_by_itself(self, replica: Replica) -> bool:
        return self.pool.ended_by_itself(replica)

    def report_doubt(self, backend: Backend) -> None:
        self.pool.report_doubt(backend)

    def end(self) -> None:
        self.wait_in(None)
        self.ended = True


def no_room_together(instance: str) -> Problem:
    """Nobody is sent away by it: each text asks alone. So it does not count as a refusal for want of capacity."""
    words = f'Instance "{instance}" has no room for single texts together now: ask for each alone'
    return Problem(Kind.PRECONDITION, "NO_ROOM_TOGETHER", words)


class SlicePermits:
    """Permits of a slice, released as its texts are answered, so that single texts find some at once."""

    def __init__(self, texts: int, backend: Backend, queue: AdmissionQueue, single: bool) -> None:
        self.texts, self.backend, self.queue, self.single = texts, backend, queue, single
        self.answered = 0

    def count_answer(self) -> None:
        self.answered += 1
        if self.answered == RELEASED_TOGETHER:
            self.release(self.answered)
            self.answered = 0

    def release_all(self, begins_anew: bool) -> None:
        self.release(self.texts, begins_anew)

    def release(self, texts: int, begins_anew: bool = False) -> None:
        self.texts -= texts
        self.backend.take(-texts)
        lane = {"interactive" if self.single else "bulk": texts}
        self.queue.release(**lane, begins_anew=begins_anew)


class SliceCall:
    """One slice on one stream."""

    def __init__(self, effects: PoolEffects, slice_: Slice, backend: Backend, queue: AdmissionQueue) -> None:
        self.effects = effects
        self.pool = effects.pool
        self.backend = backend
        self.outcome = SliceOutcome(slice_, backend)
        self.permits = SlicePermits(len(slice_.texts), backend, queue, effects.job.is_combined)
        self.moved_at = 0.0  # when the slice was sent, or the replica answered last

    def run(self) -> None:
        """The outcome goes to the run."""
        outcome = self.outcome
        try:
            self.exchange_messages()
        except WouldBlock:
            outcome.would_block = True
        except Problem as problem:
            outcome.problem = problem.with_traceback(None)
        except CallFailed as failure:
            code = STATUS.get(failure.status.code, grpc.StatusCode.UNKNOWN)
            outcome.failure = TextFailure(code, failure.status.details)
            outcome.died = code in DEATHS
            outcome.reached = failure.begun
            outcome.lost = failure.status.code == Code.UNAVAILABLE and not failure.answered and failure.begun
            if self.backend.replica.is_peer and (CODE_KEY, "REPLACED") in failure.status.trailers:
                outcome.problem = Replaced(self.effects.job.target)
        except Exception as error:  # a reply that cannot be read is the replica's fault, not the end of this thread
            outcome.failure = TextFailure(grpc.StatusCode.INTERNAL, f"The replica's answer cannot be right: {error}")
            outcome.died = outcome.wrong = True
        finally:
            if outcome.died:  # before another slice may follow: on an old connection it would seem to die again
                self.pool.connections.drop_idle(self.backend.replica)
            self.give_back()
            self.effects.outcomes.put(outcome)

    def give_back(self) -> None:
        """The permits that are left, and the lease."""
        self.permits.release_all(begins_anew=self.outcome.would_block)
        self.pool.leases.release(self.backend.replica, self.outcome.slice.careful)

    def exchange_messages(self) -> None:
        """Raises: CallFailed; ValueError for an answer that cannot be right; Problem of `on_answer`."""
        outcome, job, permits = self.outcome, self.effects.job, self.permits
        texts, on_answer = outcome.slice.texts, job.on_answer
        requests = [job.requests[text] for text in texts]
        for reply in self.replies(requests):
            if outcome.answered == len(texts):
                raise ValueError("more replies than requests")
            if not outcome.answered and (flaw := self.pool.flaw(self.backend, job.method, requests[0], reply)):
                raise ValueError(flaw)
            on_answer(texts[outcome.answered], reply)
            outcome.answered += 1
            permits.count_answer()
        if outcome.answered < len(texts):
            words = "the replica ended the stream before its last answer"
            outcome.failure = TextFailure(grpc.StatusCode.INTERNAL, words)
            outcome.died = True

    def replies(self, requests: list[bytes]) -> Iterator[bytes]:
        """In order. Several travel in one message where the replica takes that, which it is asked by doing it."""
        path = self.effects.job.path
        if self.may_pack(path, requests):
            try:
                for reply in self.packed_replies(path, list(packing.packed(requests))):
                    yield from packing.unpack(reply)
                return
            except CallFailed as failure:
                if failure.status.code != Code.UNIMPLEMENTED or self.outcome.answered:
                    raise
                self.backend.takes_packed = False
        yield from self.messages(path, requests)

    def packed_replies(self, path: str, parts: list[bytes]) -> Iterator[bytes]:
        """Those to packed messages: one is a unary call, and goes on a stream only to learn which text has failed."""
        if len(parts) == 1:
            try:
                (reply,) = self.messages(packing.UNARY_PATHS[path], parts)
                yield reply
                return
            except CallFailed as failure:
                if not failure.answered or failure.status.code == Code.UNIMPLEMENTED:
                    raise
        yield from self.messages(packing.PATHS[path], parts)

    def may_pack(self, path: str, requests: list[bytes]) -> bool:
        """Not to a peer, whose multiplexer has no such call, and not texts that are to be sent one at a time."""
        if path not in packing.PATHS or len(requests) < 2 or self.outcome.slice.careful:
            return False
        return self.backend.takes_packed and not self.backend.replica.is_peer

    def messages(self, path: str, requests: list[bytes]) -> Iterator[bytes]:
        """Those of the replies on one stream. Raises: CallFailed."""
        job = self.effects.job
        metadata: Metadata = [(LANE_KEY, SINGLE_LANE)] if job.is_combined else []
        if self.backend.replica.is_peer:
            metadata = [*metadata, *job.metadata_for_peer]
        self.moved_at = time.monotonic()
        wait = self.effects.wait
        with self.pool.connection(self.backend, may_wait=wait is None) as connection:
            call = connection.begin(path, requests, metadata, one_at_a_time=self.outcome.slice.careful)
            for reply in connection.replies(call, self.check, wait):
                self.moved_at = time.monotonic()
                yield reply

    def check(self) -> float:
        """Seconds until this is to be asked again. Raises: CallFailed when the slice must not go on."""
        now = time.monotonic()
        job, stall_secs = self.effects.job, self.effects.stall_secs
        if self.effects.ended or job.caller_left() or (job.deadline is not None and now > job.deadline):
            raise CallFailed(Status(Code.CANCELLED, "the batch has ended"), answered=False)
        if stall_secs and now - self.moved_at > stall_secs:
            message = f"no answer for {stall_secs:g} s (grpc_request_timeout_secs)"
            raise CallFailed(Status(Code.DEADLINE_EXCEEDED, message), answered=False)
        return POLL_SECS
