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

    def submit(self, given: Sequence[Any], jobs: Sequence[TextJob], single: bool) -> Problem | None:
        """Queue them together, so that they make one batch. What is refused has its outcome at once, and concerns no
        other; the first such Problem is returned, too."""
        began = time.monotonic()
        encodings: list[Any] | None = None
        try:
            encodings = self.encode(given)
        finally:
            if encodings is None:
                for job in jobs:
                    job.outcome.cancel()  # which releases its permit
        now = time.monotonic()
        refused: Problem | None = None
        accepted: list[TextJob] = []
        for job, encoding in zip(jobs, encodings, strict=True):
            if isinstance(encoding, Problem):
                refused = refused or encoding
                if job.outcome.set_running_or_notify_cancel():
                    job.finish(encoding)
            else:
                job.encoding, job.encode_secs, job.queued_at = encoding, (now - began) / len(given), now
                self.metrics.observe((self.metrics.input_length, len(encoding)))
                accepted.append(job)
        if accepted:
            self.workers[single].submit(accepted)
        return refused


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
        """Raises: Problem of what is refused."""
        if refused := intake.submit([given], [job], self.single):
            raise refused


class JointLane(Lane):
    """Inputs that are encoded and queued together, by `flush`; each waits for its permit.

    gone: whether the caller has left. single: they are single texts of several callers. refused: the first Problem of
    any of them, which is the outcome of its job, too.
    """

    def __init__(self, permits: Permits, gone: Callable[[], bool], single: bool = False) -> None:
        super().__init__(permits, single)
        self.gone = gone
        self.refused: Problem | None = None
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
        gathered, self.gathered = self.gathered, {}
        for intake, (inputs, jobs) in gathered.items():
            refused = intake.submit(inputs, jobs, self.single)
            self.refused = self.refused or refused
