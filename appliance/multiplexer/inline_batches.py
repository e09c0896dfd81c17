"""A small batch in the thread of the unary server: a greenlet carries its slice, and waits for nothing but replies.

Whatever else it would have to wait for is for a thread. Where nothing has been learned yet, `WouldBlock` is raised, and
the call begins anew in one of grpcio's. What follows a failure, of which the run knows more than its call, goes on in a
thread of its own, for which the greenlet waits.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from queue import Empty
from typing import TypeVar

from appliance.core.batching import Slice
from appliance.drivers.tei import Backend
from appliance.multiplexer.batch_effects import PoolEffects, SliceCall, ThreadsOf
from appliance.multiplexer.batch_run import BatchJob, BatchRun, SliceOutcome, Start, TextFailure
from appliance.multiplexer.cooperation import ReplyScheduler, WouldBlock
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.threads import WorkerThreads

LOOK_SECS = 1.0  # a thread that has ended says so at once
Result = TypeVar("Result")


class InlineEffects(PoolEffects):
    """`PoolEffects` without a thread, nor a look at the ports of the machine. Its methods may raise WouldBlock."""

    def __init__(self, job: BatchJob, pool: ReplicaPool, threads_of: ThreadsOf, stall_secs: float) -> None:
        super().__init__(job, pool, threads_of, stall_secs)
        assert job.scheduler
        self.wait = job.scheduler.wait
        self.has_learned = False  # the run knows how a slice has ended

    def is_expected(self) -> bool:
        raise WouldBlock

    def start(self, slice_: Slice, backend: Backend) -> Start:
        if not self.outcomes.empty():  # one after the other: a run that goes on in a thread must have learned all
            return Start.NO_LEASE
        if slice_.careful or slice_.avoid or super().start(slice_, backend) is not Start.STARTED:
            raise WouldBlock
        return Start.STARTED

    def carry(self, call: SliceCall, backend: Backend) -> None:
        call.run()

    def next_outcome(self, within_secs: float) -> SliceOutcome | None:
        try:
            outcome = self.outcomes.get_nowait()
        except Empty:
            raise WouldBlock from None
        self.has_learned = outcome is not None and not outcome.would_block
        return outcome


def run_inline(
    run: BatchRun, effects: InlineEffects, scheduler: ReplyScheduler, others: Callable[[], PoolEffects]
) -> dict[int, TextFailure]:
    """As `BatchRun.run`; others: the effects of a run that goes on in a thread. Raises: WouldBlock."""
    try:
        return run.run()
    except WouldBlock:
        if not effects.has_learned:
            raise
    run.effects = others()
    return in_thread(run.run, scheduler)


def in_thread(work: Callable[[], Result], scheduler: ReplyScheduler) -> Result:
    """What ``work`` returns or raises; it is done in a thread, while the scheduler lets others run."""
    ours, its = socket.socketpair()
    with ours:
        done = WorkerThreads(1, "batch").begin(work, its.close)
        while not done.done():
            scheduler.wait(ours, select.POLLIN, LOOK_SECS)
    return done.result()
