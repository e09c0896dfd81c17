"""The threads that compute: each takes a batch from the queue, runs the model, and gives each text its own row."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from appliance.core.problems import Kind, Problem
from appliance.drivers.cores import AllCores, Core
from appliance.drivers.ending import leave
from appliance.engine.batching import LengthQueue
from appliance.engine.metrics import EngineMetrics
from appliance.engine.runtime import Runtime

log = logging.getLogger(__name__)
# Words of torch (2.11) and onnxruntime (1.30), whose exceptions have no classes for that.
LACKS_MEMORY = (
    *("bfc_arena", "Failed to allocate memory", "bad allocation"),
    *("CUDA failure 2:", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)
LOST = ("CUDA error", "CUDA failure")

# ([tokens, width] without padding, or [values]; the tokens) to what is kept of it: an array, or several.
Reduce = Callable[[np.ndarray, Any], Any]


@dataclass
class TextJob:
    """One text on its way. ``outcome`` becomes `reduce` of the text's part of the model's output, or a Problem.

    The worker reduces, because hidden states are some hundred times larger than the answer, and a stream has hundreds
    of answers waiting. pooling: what of its hidden states ``reduce`` takes, which a GPU may pool itself; None: all.
    encoding: None until it was accepted. release: of its permit. Times are of time.monotonic.
    """

    encoding: Any
    reduce: Reduce
    pooling: str | None = None
    encode_secs: float = 0.0
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    ended_at: float = 0.0
    outcome: Future[Any] = field(default_factory=Future)
    release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.release_once = once(self.release)
        self.outcome.add_done_callback(self.release_once)  # also when it is cancelled

    def finish(self, result: Any) -> None:
        """Set the outcome, which nobody has cancelled: what was computed, or the Problem with it.

        The permit is released before that, so that the caller's next text finds one.
        """
        self.release_once()
        if isinstance(result, Problem):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


def once(call: Callable[[], None]) -> Callable[..., None]:
    """Calls it the first time, in whatever thread that is. It knows nothing of the job whose outcome has it: such a
    circle, with all tokens of the text, would stay until garbage is collected."""
    calls = iter((call,))

    def first(*_: object) -> None:
        for each in calls:
            each()

    return first


class InferenceWorker:
    """A queue of texts and the threads that compute them with a Runtime.

    on_result(ok) is called for every batch; threads: batches at once; nice: the niceness of these threads; cores: what
    each of them leases for a batch, beside the other engines of this machine; empty: nothing; all_cores: with
    which a lone text is computed where it is alone there; inline: whether a text is computed by whoever brings it
    while nothing else is in work.
    """

    def __init__(
        self,
        runtime: Runtime,
        queue: LengthQueue,
        metrics: EngineMetrics,
        on_result: Callable[[bool], None],
        threads: int,
        nice: int,
        cores: Sequence[Core] = (),
        all_cores: AllCores | None = None,
        inline: bool = False,
    ) -> None:
        self.metrics = metrics
        self.on_result = on_result
        self.runtime = runtime
        self.queue = queue
        self.wakeup = threading.Condition()
        self.all_cores = all_cores
        self.inline = inline
        self.busy = 0  # batches in work
        self.nice = nice
        self.cores = cores
        self.threads = [
            threading.Thread(
                target=self.work, args=(cores[number] if cores else None,), name=f"inference-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, jobs: Sequence[TextJob]) -> None:
        """Queue texts, of which the first batch is made when all of them are there.

        While nothing else is in work, a single one is computed at once, in the thread that brings it: to hand it over
        and the answer back takes a tenth of the time of a short text.
        """
        with self.wakeup:
            if idle := self.inline and len(jobs) == 1 and not self.busy and not self.queue:
                self.busy += 1
        if idle:
            with self.all_cores.turn.lease() if self.all_cores else nullcontext():
                self.compute_and_leave(list(jobs))
            return
        with self.wakeup:
            for job in jobs:
                self.queue.put(len(job.encoding), job)
            self.metrics.queue_size.inc(len(jobs))
            # The first that gets its core computes.
            self.wakeup.notify(len(self.threads) if self.cores else len(jobs))

    def work(self, core: Core | None) -> None:
        if sys.platform == "linux":  # elsewhere it would concern the whole process
            os.nice(self.nice)
        while True:
            with self.wakeup:
                while not self.queue or self.busy >= len(self.threads):
                    self.wakeup.wait()
            # First the core, then the batch: meanwhile it grows, or a worker that has a core takes it.
            with core.lease() if core else nullcontext():
                self.compute_next(core)

    def compute_next(self, core: Core | None = None) -> None:
        """The next batch; nothing when another worker has taken it."""
        with self.wakeup:
            batch = self.queue.next_batch(self.runtime.token_secs)
            self.busy += 1
        self.metrics.queue_size.dec(len(batch))
        self.compute_and_leave(batch, core)

    def compute_and_leave(self, batch: list[TextJob], core: Core | None = None) -> None:
        try:
            self.compute_wanted(batch, core)
        finally:
            with self.wakeup:
                self.busy -= 1
                self.wakeup.notify()

    def compute_wanted(self, batch: list[TextJob], core: Core | None) -> None:
        # Texts whose caller has gone are skipped.
        jobs = [job for job in batch if job.outcome.set_running_or_notify_cancel()]
        if dropped := len(batch) - len(jobs):
            self.metrics.failures.labels("dropped").inc(dropped)
        if jobs:
            self.compute(jobs, core)

    def compute(self, jobs: list[TextJob], core: Core | None = None) -> None:
        """Compute one batch. on_result(True) is called before outcomes are set; on_result(False) when nothing could be
        computed."""
        if not self.computed_in_parts(jobs, core):
            self.on_result(False)

    def computed_in_parts(self, jobs: list[TextJob], core: Core | None) -> bool:
        """Compute the jobs; whether that worked for any. If a batch fails, each half of it is computed, and so on:
        where there was no memory for all together, and only the text at fault fails."""
        if self.computed(jobs, core):
            return True
        middle = len(jobs) // 2
        worked = [self.computed_in_parts(half, core) for half in (jobs[:middle], jobs[middle:]) if middle]
        return any(worked)

    @contextmanager
    def all_cores_now(self, texts: int, core: Core | None) -> Iterator[bool]:
        """Whether a batch of so many texts is alone on this machine while the block runs."""
        if texts > 1 or self.queue or self.all_cores is None:
            yield False
            return
        with self.all_cores.lease_now(core) as alone:
            yield alone

    def computed(self, jobs: list[TextJob], core: Core | None) -> bool:
        """Compute the jobs as one batch; whether that worked. Then each job has its outcome; a lone job always has."""
        started = time.monotonic()
        lengths = [len(job.encoding) for job in jobs]
        try:
            with self.metrics.batch(lengths):
                with self.all_cores_now(len(jobs), core) as alone:
                    pooling = jobs[0].pooling if len({job.pooling for job in jobs}) == 1 else None
                    output = self.runtime.run(self.runtime.batch([job.encoding for job in jobs]), alone, pooling)
                results = [reduced(job, part) for job, part in zip(jobs, split(output, lengths), strict=True)]
        except Exception as error:  # whatever the runtime raises
            if lost_gpu(error):
                # Each text would be refused until the monitor has seen it. So they are asked of another replica.
                log.critical("The GPU is lost to this process, which ends to be started anew: %s", error)
                leave(1)
            if len(jobs) > 1:
                log.warning("Inference of %s texts failed, now half of them at a time: %s", len(jobs), error)
                if lacks_memory(error):
                    self.shrink(len(jobs) * max(lengths))
            else:
                log.exception("Inference of a text of %s tokens failed", lengths[0])
                jobs[0].finish(backend(str(error)))
            return False
        self.on_result(True)
        ended = time.monotonic()
        for job, result in zip(jobs, results, strict=True):
            job.started_at, job.ended_at = started, ended
            job.finish(result)
        return True

    def shrink(self, tokens: int) -> None:
        with self.wakeup:
            budget = self.queue.shrink(tokens, time.monotonic())
        log.warning("There is no memory for %s tokens: the next batches have at most %s", tokens, budget)


def lacks_memory(error: Exception) -> bool:
    """Whether a smaller batch might be computed."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in LACKS_MEMORY)


def lost_gpu(error: Exception) -> bool:
    """Whether the GPU refuses everything that this process asks of it from now on."""
    return not lacks_memory(error) and any(words in str(error) for words in LOST)


def whole(part: np.ndarray, encoding: Any) -> np.ndarray:
    """A `Reduce` that keeps everything: a copy, or the output of the whole batch would be kept."""
    return part.copy()


def reduced(job: TextJob, part: np.ndarray) -> Any:
    """The reduced output of a text, or what is wrong with it; the latter concerns no other text of the batch."""
    try:
        return job.reduce(part, job.encoding)
    except Problem as problem:
        return problem


def backend(message: str) -> Problem:
    return Problem(Kind.PRECONDITION, "BACKEND", f"Backend error: {message}")


def split(output: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Each text's own part: hidden states without padding, or its row."""
    if output.ndim == 3:
        return [output[row, :length] for row, length in enumerate(lengths)]
    return list(output)
