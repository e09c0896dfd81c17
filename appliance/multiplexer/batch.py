"""A batch of rows over all ready replicas: `core.batching` plans and mends, threads here carry the slices.

One job runs in the thread of its call. It hands slices to replicas that have room, takes what comes back, and returns
when every row is answered or has failed. Nothing outlives its deadline: slices in flight are cancelled with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from weakref import WeakKeyDictionary

import grpc

from appliance.core import batching, routing
from appliance.core.batching import Slice, Waiting
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target
from appliance.drivers.grpcserver import STATUS
from appliance.drivers.http2 import CANCELLED, UNAVAILABLE, CallFailed
from appliance.drivers.tei import Backend
from appliance.multiplexer.admission_queue import AdmissionQueue, BulkWaiter
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.suspicion import Convicted, Suspicion

log = logging.getLogger(__name__)
SLICES_IN_FLIGHT = 2  # per replica and job: one computes, one is on its way
THREADS = 128  # slices of all jobs in flight at one replica; more of them wait there
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
RELEASED_AT_ONCE = 8  # rows
POLL_SECS = 0.05  # how often a job without outcomes looks for permits, new replicas and its own end
# The replica ended the stream, not the row: what it did not answer is computed elsewhere.
DEATHS = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True)
class RowError:
    """Why a row has no answer, in the words of the replica that refused it."""

    code: grpc.StatusCode
    details: str


@dataclass
class SliceOutcome:
    """How one slice ended: rows answered in order, and the error that ended the rest, if any."""

    slice: Slice
    backend: Backend
    answered: int = 0
    error: RowError | None = None
    died: bool = False
    lost: bool = False  # its connection broke, as it does when the process ends
    wrong: bool = False  # it answered what cannot be right
    reached: bool = True  # the replica may have worked on it
    problem: Problem | None = None  # the whole job cannot go on


@dataclass
class BatchJob:
    """What one batch call asks for.

    method: the unary name of what is asked; requests: the serialized TEI request of each row; lengths: a measure of
    cost per row; on_answer(row, reply bytes) is called once for each answered row, from one thread at a time for each
    slice; gone() tells that the caller left.
    """

    target: Target
    method: str
    path: str
    requests: Sequence[bytes]
    lengths: Sequence[int]
    on_answer: Callable[[int, bytes], None]
    deadline: float | None
    gone: Callable[[], bool]
    keep_errors: bool
    errors: dict[int, RowError] = field(default_factory=dict)


class SlicePermits:
    """Permits of a slice, released as its rows are answered, so that single texts find some at once."""

    def __init__(self, texts: int, backend: Backend, queue: AdmissionQueue) -> None:
        self.texts, self.backend, self.queue = texts, backend, queue
        self.done = 0

    def answered(self) -> None:
        self.done += 1
        if self.done == RELEASED_AT_ONCE:
            self.give_back(self.done)
            self.done = 0

    def release(self) -> None:
        self.give_back(self.texts)

    def give_back(self, texts: int) -> None:
        self.texts -= texts
        self.backend.take(-texts)
        self.queue.release(bulk=texts)


class RowFailed(Exception):
    """The first row that failed ends the call, unless the caller asked for null rows."""

    def __init__(self, row: int, error: RowError) -> None:
        super().__init__(error.details)
        self.row = row
        self.error = error


class BatchRunner:
    """Runs jobs. stall_secs: how long a replica may owe an answer (0: for ever).

    max_wait_secs: how long a job without any ready replica waits for one to come back.
    """

    def __init__(self, pool: ReplicaPool, stall_secs: float, max_wait_secs: float) -> None:
        self.pool = pool
        self.stall_secs = stall_secs
        self.max_wait_secs = max_wait_secs
        self.threads = WeakKeyDictionary[Backend, ThreadPoolExecutor]()  # a replica that hangs keeps only its own
        self.lock = threading.Lock()

    def run(self, job: BatchJob) -> dict[int, RowError]:
        """Answer every row of the job; returns the rows that failed.

        Raises: RowFailed for the first of them unless the job keeps errors; Problem when there is no replica, the
        deadline passes, or the caller is gone.
        """
        replicas = self.pool.ready(job.target)
        refused = self.convicted_rows(job, self.pool.suspicion(replicas[0].replica))
        if refused and not job.keep_errors:
            raise RowFailed(*next(iter(refused.items())))
        job.errors.update(refused)
        return BatchRun(self, job, replicas).run()

    def convicted_rows(self, job: BatchJob, suspicion: Suspicion) -> dict[int, RowError]:
        """Rows that have ended replicas before: they do not reach another one."""
        errors: dict[int, RowError] = {}
        if not suspicion.suspects.clean:
            for row, request in enumerate(job.requests):
                try:
                    suspicion.standing(job.method, request)
                except Convicted as convicted:
                    errors[row] = RowError(grpc.StatusCode.INTERNAL, convicted.message)
        return errors

    def threads_of(self, backend: Backend) -> ThreadPoolExecutor:
        """They end with the backend: nobody else holds the pool."""
        with self.lock:
            if backend not in self.threads:
                self.threads[backend] = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="slice")
            return self.threads[backend]


class BatchRun:
    """One job in progress; its state is touched by the job's own thread only."""

    def __init__(self, runner: BatchRunner, job: BatchJob, replicas: list[Backend]) -> None:
        self.runner = runner
        self.pool = runner.pool
        self.job = job
        self.replicas = replicas
        lanes = [self.pool.queue(backend).lanes for backend in replicas]
        share = min((each.bulk_limit for each in lanes if each.capacity), default=batching.LARGEST)
        largest = share // (SLICES_IN_FLIGHT * len(replicas))
        planned = batching.plan(job.lengths, len(replicas), largest)
        self.pending = Waiting(batching.without(planned, job.errors))
        self.outcomes = outcomes = SimpleQueue[SliceOutcome | None]()
        self.in_flight: Counter[Backend] = Counter()
        self.ended = False  # read by the slices' threads: they end at once
        self.unreachable_since: float | None = None  # nobody there, or nobody to be reached
        self.rest_until = 0.0
        # Not by way of self: a cycle would keep all rows until it is collected.
        self.waiter = BulkWaiter(lambda: outcomes.put(None))
        self.waits_in: AdmissionQueue | None = None

    def run(self) -> dict[int, RowError]:
        try:
            while self.pending or self.in_flight.total():
                self.assign()
                self.refuse_ended()
                try:
                    outcome = self.outcomes.get(timeout=POLL_SECS)
                except Empty:
                    continue
                if outcome:
                    self.settle(outcome)
        finally:
            if self.waits_in:
                self.waits_in.withdraw(self.waiter)
            self.ended = True
        return self.job.errors

    def assign(self) -> None:
        """Give waiting slices to ready replicas with room, least busy first."""
        ready = self.ready_replicas()
        self.refuse_unreachable(ready)
        full = self.send(ready) if time.monotonic() >= self.rest_until else None
        if self.waits_in and self.waits_in is not full:  # one that wants nothing there must not hold up others
            self.waits_in.withdraw(self.waiter)
        self.waits_in = full

    def send(self, ready: list[Backend]) -> AdmissionQueue | None:
        """Start what there is room for; the queue that had none for the next slice, if that was the reason to stop."""
        while assignment := self.next_assignment(ready):
            slice_, backend = assignment
            queue = self.pool.queue(backend)
            if not queue.try_acquire_bulk(self.waiter, len(slice_.rows)):
                self.pool.leases.release(backend.replica, slice_.careful)
                return queue
            self.pending.remove(slice_)
            self.in_flight[backend] += 1
            backend.take(len(slice_.rows))
            self.runner.threads_of(backend).submit(self.run_slice, slice_, backend, queue)
        return None

    def next_assignment(self, ready: list[Backend]) -> tuple[Slice, Backend] | None:
        """The next slice, and its replica; one that has to wait for its replica holds up no other."""
        for slice_ in self.pending.candidates():
            backend = self.choose(ready, slice_)
            if backend and self.pool.leases.acquire(backend.replica, slice_.careful):
                return slice_, backend
        return None

    def ready_replicas(self) -> list[Backend]:
        """None while all are away for the moment. Raises: Problem when the instance is stopped or deleted."""
        try:
            return self.pool.ready(self.job.target)
        except Problem as problem:
            if problem.kind is not Kind.UNAVAILABLE:
                raise
            return []

    def choose(self, ready: list[Backend], slice_: Slice) -> Backend | None:
        """Not the replica that died with the slice, while there is another one."""
        others = [backend for backend in ready if backend.replica.address != slice_.avoid] or ready
        free = [backend for backend in others if self.in_flight[backend] < SLICES_IN_FLIGHT]
        return min(free, key=lambda backend: backend.outstanding, default=None)

    def refuse_unreachable(self, ready: list[Backend]) -> None:
        """Raises: Problem unavailable when no replica came back for too long."""
        if self.in_flight.total() or (ready and self.unreachable_since is None):
            return
        self.unreachable_since = self.unreachable_since or time.monotonic()
        if time.monotonic() - self.unreachable_since > self.runner.max_wait_secs:
            raise routing.none_ready([backend.replica for backend in self.replicas])

    def refuse_ended(self) -> None:
        """Raises: Problem when the deadline passed or the caller is gone."""
        if self.job.gone():
            raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        if self.job.deadline is not None and time.monotonic() > self.job.deadline:
            raise Problem(
                Kind.TIMEOUT, "TIMEOUT", f"The deadline passed; {self.pending.rows} rows had not been sent yet"
            )

    def run_slice(self, slice_: Slice, backend: Backend, queue: AdmissionQueue) -> None:
        """In a thread: one slice on one stream."""
        outcome = SliceOutcome(slice_, backend)
        permits = SlicePermits(len(slice_.rows), backend, queue)
        try:
            self.exchange_messages(outcome, permits)
        except Problem as problem:
            outcome.problem = problem.with_traceback(None)
        except CallFailed as failure:
            outcome.error = RowError(STATUS.get(failure.code, grpc.StatusCode.UNKNOWN), failure.details)
            outcome.died = outcome.error.code in DEATHS
            outcome.reached = failure.begun
            outcome.lost = failure.code == UNAVAILABLE and not failure.answered and failure.begun
        except Exception as error:  # a reply that cannot be read is the replica's fault, not the end of this thread
            outcome.error = RowError(grpc.StatusCode.INTERNAL, f"The replica's answer cannot be right: {error}")
            outcome.died = outcome.wrong = True
        finally:
            permits.release()
            if outcome.died:  # before another slice may follow: on an old connection it would seem to die again
                self.pool.connections.drop_idle(backend.replica)
            self.pool.leases.release(backend.replica, slice_.careful)
            self.outcomes.put(outcome)

    def exchange_messages(self, outcome: SliceOutcome, permits: SlicePermits) -> None:
        slice_, job = outcome.slice, self.job
        messages = [job.requests[row] for row in slice_.rows]
        moved_at = time.monotonic()

        def check() -> float:
            now = time.monotonic()
            if self.ended or (job.deadline is not None and now > job.deadline):
                raise CallFailed(CANCELLED, "the batch has ended", [], answered=False)
            if self.runner.stall_secs and now - moved_at > self.runner.stall_secs:
                message = f"no answer for {self.runner.stall_secs:g} s (grpc_request_timeout_secs)"
                raise CallFailed(DEADLINE, message, [], answered=False)
            return POLL_SECS

        with self.pool.connection(outcome.backend) as connection:
            exchange = connection.begin(job.path, messages, [], one_at_a_time=slice_.careful)
            for reply in connection.replies(exchange, check):
                if outcome.answered == len(slice_.rows):
                    raise ValueError("more replies than requests")
                job.on_answer(slice_.rows[outcome.answered], reply)
                outcome.answered += 1
                permits.answered()
                moved_at = time.monotonic()
        if outcome.answered < len(slice_.rows):
            outcome.error = RowError(grpc.StatusCode.INTERNAL, "the replica ended the stream before its last answer")
            outcome.died = True

    def settle(self, outcome: SliceOutcome) -> None:
        """Book what a slice has done, and put what is left of it in front of the list."""
        self.in_flight[outcome.backend] -= 1
        if outcome.answered:
            self.unreachable_since = None
            suspicion = self.pool.suspicion(outcome.backend.replica)
            suspicion.answered(self.job.method)
            for row in outcome.slice.rows[: outcome.answered] if outcome.slice.careful else ():
                suspicion.answered(self.job.method, self.job.requests[row])
        if problem := outcome.problem:  # a copy: an exception that its own frames know keeps all rows in memory
            raise Problem(problem.kind, problem.code, problem.message, problem.retry_after_ms)
        if outcome.error is None:
            return
        address = outcome.backend.replica.address
        blamed: int | None = None
        left: Slice | None
        if not outcome.reached and not outcome.answered:
            left = batching.after_no_connection(outcome.slice, address)
            self.rest_until = time.monotonic() + POLL_SECS
            self.unreachable_since = self.unreachable_since or time.monotonic()
        elif outcome.died:
            hung = outcome.error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            blamed, left = batching.after_death(outcome.slice, outcome.answered, address, hung)
            log_loss(outcome)
            if outcome.wrong:
                self.pool.report_doubt(outcome.backend)
            if outcome.lost and not outcome.backend.is_cut:
                self.suspect(outcome, blamed)
        else:
            blamed, left = batching.after_bad_row(outcome.slice, outcome.answered)
        if left:
            self.pending.appendleft(left)
        if blamed is not None:
            if not self.job.keep_errors:
                raise RowFailed(blamed, outcome.error)
            self.job.errors[blamed] = outcome.error

    def suspect(self, outcome: SliceOutcome, blamed: int | None) -> None:
        """Remember the rows that were in work at a death, so that their like is tried alone, and no replica is given up
        for them; a row that is blamed is convicted."""
        replica, rows = outcome.backend.replica, outcome.slice.rows[outcome.answered :]
        if not self.pool.ended_by_itself(replica):
            return
        suspicion = self.pool.suspicion(replica)
        if blamed is not None:
            convicted = suspicion.convict(self.job.method, self.job.requests[blamed], replica)
            outcome.error = RowError(grpc.StatusCode.INTERNAL, convicted.message)
            return
        in_work = rows[:1] if outcome.slice.careful else rows
        suspicion.suspect(self.job.method, [self.job.requests[row] for row in in_work], replica)


def log_loss(outcome: SliceOutcome) -> None:
    """For the log: operators see here which replica a batch has lost."""
    replica, owed = outcome.backend.replica, len(outcome.slice.rows) - outcome.answered
    words = 'Replica %s of "%s" went away and owes %s rows of a batch: %s'
    log.warning(words, replica.index, replica.instance, owed, outcome.error and outcome.error.details)
