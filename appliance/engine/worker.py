"""The threads that compute: each takes a batch from the pool, runs the model, hands each text its own row."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from appliance.core.problems import Kind, Problem
from appliance.drivers.modelfolder import Card
from appliance.engine.batching import Pool
from appliance.engine.metrics import Metrics
from appliance.engine.runtime import Runtime, rows

log = logging.getLogger(__name__)


Reduce = Callable[[np.ndarray], np.ndarray]  # [tokens, width] without padding, or [values], to what is kept


@dataclass
class Job:
    """One text on its way. ``outcome`` gets `reduce` of its part of the model's output, or a Problem.

    Reduced by the worker, because hidden states are some hundred times larger than what is answered, and a stream has
    hundreds of answers waiting. Times are of time.monotonic.
    """

    encoding: Any
    reduce: Reduce
    encode_secs: float
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    ended_at: float = 0.0
    outcome: Future[np.ndarray] = field(default_factory=Future)
    release: Callable[[], None] = lambda: None
    released: bool = False

    def leave(self, *_: object) -> None:
        """Give the text's permit back, once: before its answer is out, or its caller's next text may find none."""
        if not self.released:
            self.released = True
            self.release()


class Worker:
    """A pool in front of a Runtime.

    on_result(ok) is called for every batch; threads: batches at once; nice: how far these threads step back.
    """

    def __init__(
        self,
        runtime: Runtime,
        card: Card,
        pool: Pool,
        metrics: Metrics,
        on_result: Callable[[bool], None],
        threads: int,
        nice: int,
    ) -> None:
        self.metrics = metrics
        self.on_result = on_result
        self.runtime = runtime
        self.card = card
        self.pool = pool
        self.wakeup = threading.Condition()
        self.nice = nice
        for number in range(threads):
            threading.Thread(target=self.work, name=f"inference-{number}", daemon=True).start()

    def submit(self, encoding: Any, reduce: Reduce, encode_secs: float, release: Callable[[], None]) -> Job:
        """release: gives the text's permit back."""
        job = Job(encoding, reduce, encode_secs, release=release)
        job.outcome.add_done_callback(job.leave)  # also when it is cancelled
        with self.wakeup:
            self.pool.put(len(encoding), job)
            self.metrics.queue_size.inc()
            self.wakeup.notify()
        return job

    def work(self) -> None:
        if sys.platform == "linux":  # where it concerns this thread alone
            os.nice(self.nice)
        while True:
            with self.wakeup:
                while not (batch := self.pool.take()):
                    self.wakeup.wait()
            self.metrics.queue_size.dec(len(batch))
            # Texts whose caller has gone are skipped.
            jobs = [job for job in batch if job.outcome.set_running_or_notify_cancel()]
            if dropped := len(batch) - len(jobs):
                self.metrics.failures.labels("dropped").inc(dropped)
            if jobs:
                self.compute(jobs)

    def compute(self, jobs: list[Job]) -> None:
        """One batch. Where it fails each of its texts is computed by itself, once, so that only the guilty one fails.

        on_result hears of a failure when nothing could be computed, and of a success before it is told.
        """
        if self.computed(jobs):
            return
        alone = [self.computed([job]) for job in jobs] if len(jobs) > 1 else []
        if not any(alone):
            self.on_result(False)

    def computed(self, jobs: list[Job]) -> bool:
        """Whether the runtime could; then each job has its outcome. A lone job has its outcome in any case."""
        started = time.monotonic()
        lengths = [len(job.encoding) for job in jobs]
        try:
            with self.metrics.batch(lengths):
                ids, mask, types = rows([job.encoding for job in jobs], self.card)
                output = self.runtime.run(ids, mask, types)
                results = [reduced(job, part) for job, part in zip(jobs, split(output, lengths), strict=True)]
        except Exception as error:  # whatever the runtime raises
            if len(jobs) > 1:
                log.warning("Inference of %s texts failed, now one by one: %s", len(jobs), error)
            else:
                log.exception("Inference of a text of %s tokens failed", lengths[0])
                jobs[0].outcome.set_exception(backend(str(error)))
            return False
        self.on_result(True)
        ended = time.monotonic()
        for job, result in zip(jobs, results, strict=True):
            job.started_at, job.ended_at = started, ended
            job.leave()
            if isinstance(result, Problem):
                job.outcome.set_exception(result)
            else:
                job.outcome.set_result(result)
        return True


def reduced(job: Job, part: np.ndarray) -> np.ndarray | Problem:
    """What is kept of a text's output, or what is wrong with it: that concerns no other text."""
    try:
        return job.reduce(part)
    except Problem as problem:
        return problem


def backend(message: str) -> Problem:
    return Problem(Kind.PRECONDITION, "BACKEND", f"Backend error: {message}")


def split(output: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Each text's own part: hidden states without padding, or its row."""
    if output.ndim == 3:
        return [output[row, :length] for row, length in enumerate(lengths)]
    return list(output)
