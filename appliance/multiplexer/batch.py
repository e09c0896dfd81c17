"""Batches of texts over all ready replicas of a target: a run of each, and the threads that carry its slices."""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from weakref import WeakKeyDictionary

import grpc

from appliance.core import batching
from appliance.core.batching import WaitingSlices
from appliance.drivers.tei import Backend
from appliance.multiplexer.arrivals import Limits
from appliance.multiplexer.batch_effects import PoolEffects
from appliance.multiplexer.batch_run import SLICES_IN_FLIGHT, BatchJob, BatchRun, TextFailure
from appliance.multiplexer.cooperation import looking
from appliance.multiplexer.inline_batches import InlineEffects, run_inline
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.suspicion import Convicted, Suspicion
from appliance.multiplexer.threads import WorkerThreads

THREADS = 128  # slices of all jobs in flight at one replica; more of them wait there


class BatchRunner:
    """Runs jobs, each in the thread of its call. stall_secs: how long a replica may owe an answer (0: for ever).

    max_wait_secs: how long a job without any ready replica waits for one to come back.
    """

    def __init__(self, pool: ReplicaPool, stall_secs: float, max_wait_secs: float) -> None:
        self.pool = pool
        self.stall_secs = stall_secs
        self.max_wait_secs = max_wait_secs
        self.threads = WeakKeyDictionary[Backend, WorkerThreads]()  # a replica that hangs keeps only its own
        self.lock = threading.Lock()

    def run(self, job: BatchJob) -> dict[int, TextFailure]:
        """Answer every text of the job; returns those that failed, at most one unless the job keeps failures.

        Raises: Problem when there is no replica, the deadline passes, or the caller has left.
        """
        with self.pool.arrivals.using(job.target):  # also between two slices
            return self.run_in_use(job)

    def run_in_use(self, job: BatchJob) -> dict[int, TextFailure]:
        """As `run`; meanwhile the instance is not put to sleep."""

        choose = looking(job.scheduler, lambda look: self.pool.ready(job.target, look=look))

        def limits() -> Limits:
            if not job.waits:
                return Limits(time.monotonic(), lambda: True)
            default = time.monotonic() + (self.stall_secs or math.inf)
            return Limits(default if job.deadline is None else job.deadline, lambda: not job.caller_left())

        backends = self.pool.arrivals.until_ready(job.target, choose, limits)
        failures = self.convicted(job, self.pool.suspicion(backends[0].replica))
        if failures and not job.keep_failures:
            return dict([next(iter(failures.items()))])
        waiting = WaitingSlices(batching.without(self.plan(job, backends), failures))
        in_threads = partial(PoolEffects, job, self.pool, self.threads_of, self.stall_secs)
        replicas = [backend.replica for backend in backends]
        if job.scheduler is None:
            return BatchRun(job, in_threads(), waiting, replicas, failures, self.max_wait_secs).run()
        inline = InlineEffects(job, self.pool, self.threads_of, self.stall_secs)
        run = BatchRun(job, inline, waiting, replicas, failures, self.max_wait_secs)
        return run_inline(run, inline, job.scheduler, in_threads)

    def plan(self, job: BatchJob, backends: list[Backend]) -> list[batching.Slice]:
        """No slice is so large that another one of the job could not be in flight beside it."""
        lanes = [self.pool.queue(backend).lanes for backend in backends]
        share = min((each.bulk_limit for each in lanes if each.capacity), default=batching.LARGEST)
        return batching.plan(job.lengths, len(backends), share // (SLICES_IN_FLIGHT * len(backends)))

    def convicted(self, job: BatchJob, suspicion: Suspicion) -> dict[int, TextFailure]:
        """Texts that have ended replicas before: they do not reach another one."""
        failures: dict[int, TextFailure] = {}
        if not suspicion.suspects.clean:
            for text, request in enumerate(job.requests):
                try:
                    suspicion.standing(job.method, request)
                except Convicted as convicted:
                    failures[text] = TextFailure(grpc.StatusCode.INTERNAL, convicted.message)
        return failures

    def threads_of(self, backend: Backend) -> WorkerThreads:
        """They end with the backend: nothing else refers to them."""
        with self.lock:
            if backend not in self.threads:
                self.threads[backend] = WorkerThreads(THREADS, "slice")
            return self.threads[backend]
