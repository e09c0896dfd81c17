"""The way of an input from its caller to the workers: its permit, its tokens or pixels, its place in a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from appliance.core.problems import Kind, Problem
from appliance.engine.metrics import EngineMetrics
from appliance.engine.worker import InferenceWorker, TextJob


class Intake:
    """Makes tokens of texts, or pixels of images, and queues them.

    encode: for each of what is given what the model takes, or the Problem with it. workers: of single inputs, and of
    those of streams.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Any]], list[Any]],
        workers: dict[bool, InferenceWorker],
        metrics: EngineMetrics,
    ) -> None:
        self.encode = encode
        self.workers = workers
        self.metrics = metrics

    def submit(self, given: Sequence[Any], jobs: Sequence[TextJob], single: bool, whole: bool) -> Problem | None:
        """Queue them together, so that they make one batch. What is refused has its outcome at once.

        whole: all of them, or none: then none is queued, all jobs are cancelled, and the first Problem is returned.
        """
        began = time.monotonic()
        encodings: list[Any] | None = None
        try:
            encodings = self.encode(given)
        finally:
            if encodings is None:
                for job in jobs:
                    job.outcome.cancel()  # which releases its permit
        now = time.monotonic()
        if whole and (refused := next((each for each in encodings if isinstance(each, Problem)), None)):
            for job in jobs:
                job.outcome.cancel()
            return refused
        accepted: list[TextJob] = []
        for job, encoding in zip(jobs, encodings, strict=True):
            if isinstance(encoding, Problem):
                if job.outcome.set_running_or_notify_cancel():
                    job.finish(encoding)
            else:
                job.encoding, job.encode_secs, job.queued_at = encoding, (now - began) / len(given), now
                self.metrics.input_length.observe(len(encoding))
                accepted.append(job)
        if accepted:
            self.workers[single].submit(accepted)
        return None


class Permits:
    """One permit for each text in work; their number is TEI's max_concurrent_requests."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self.acquired = 0  # ever
        self.acquired_before = 0  # at the last call of `idle`
        self.changed = threading.Condition()

    def acquire_now(self) -> None:
        """Acquire one permit at once. Raises: Problem (exhausted) when there is none."""
        with self.changed:
            if not self.free:
                raise Problem(Kind.EXHAUSTED, "OVERLOADED", "Model is overloaded")
            self.free -= 1
            self.acquired += 1

    def acquire(self, gone: Callable[[], bool]) -> None:
        """Acquire one permit as soon as there is one. Raises: CancelledError when the caller is ``gone`` first."""
        with self.changed:
            while not self.free and not gone():
                self.changed.wait(timeout=0.5)
            if gone():
                self.changed.notify()  # what woke it up may be meant for the next one
                raise CancelledError
            self.free -= 1
            self.acquired += 1

    def release(self) -> None:
        with self.changed:
            self.free += 1
            self.changed.notify()

    def idle(self) -> bool:
        """Whether nothing is in work, and nothing was since the last call."""
        with self.changed:
            quiet = self.free == self.count and self.acquired == self.acquired_before
            self.acquired_before = self.acquired
            return quiet


class Lane:
    """Each input alone, with a permit at once or not at all. Single texts have threads of their own, so that none waits
    for a running batch; the kernel shares the cores between the two."""

    def __init__(self, permits: Permits, single: bool) -> None:
        self.permits = permits
        self.single = single

    def acquire(self) -> None:
        """Raises: Problem, or CancelledError."""
        self.permits.acquire_now()

    def submit(self, intake: Intake, given: Any, job: TextJob) -> None:
        """Raises: Problem of what is refused; then the job is cancelled."""
        refused = intake.submit([given], [job], self.single, whole=True)
        try:
            if refused:
                raise refused
        finally:
            del refused  # its traceback has this frame


class JointLane(Lane):
    """Inputs that are encoded and queued together, by `flush`; each waits for its permit.

    gone: whether the caller has left. single: they are single texts of several callers. whole: where one is refused, so
    are all that are not computed yet; else it is the outcome of its job.
    """

    def __init__(self, permits: Permits, gone: Callable[[], bool], single: bool = False, whole: bool = False) -> None:
        super().__init__(permits, single)
        self.gone = gone
        self.whole = whole
        self.gathered: dict[Intake, tuple[list[Any], list[TextJob]]] = {}

    def acquire(self) -> None:
        """What has a permit already is computed while another one is waited for."""
        if self.gone():
            raise CancelledError
        try:
            self.permits.acquire_now()
        except Problem:
            self.flush()
            self.permits.acquire(self.gone)

    def submit(self, intake: Intake, given: Any, job: TextJob) -> None:
        inputs, jobs = self.gathered.setdefault(intake, ([], []))
        inputs.append(given)
        jobs.append(job)

    def flush(self) -> None:
        """Raises: Problem of what is refused, where all are."""
        gathered, self.gathered = self.gathered, {}
        for intake, (inputs, jobs) in gathered.items():
            refused = intake.submit(inputs, jobs, self.single, self.whole)
            try:
                if refused:
                    raise refused
            finally:
                del refused
