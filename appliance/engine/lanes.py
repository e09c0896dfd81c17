"""How texts go to the model: with a permit each, one by one or several together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import NamedTuple

from appliance.core.problems import Kind, Problem
from appliance.engine.worker import InferenceWorker, TextJob


def submit_now(worker: InferenceWorker, job: TextJob) -> None:
    worker.submit([job])


class Lane(NamedTuple):
    """How a text goes to the model. Single texts have threads of their own, so that none waits for a running batch; the
    kernel shares the cores between the two."""

    acquire: Callable[[], None]  # acquires one permit: waits for it, or refuses at once
    single: bool
    submit: Callable[[InferenceWorker, TextJob], None] = submit_now  # or later, together with others


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


class JointLane:
    """A lane for texts that are queued together, by `submit`, so that they make one batch; each waits for its permit.

    gone: whether the caller has left. single: they are single texts of several callers.
    """

    def __init__(self, permits: Permits, gone: Callable[[], bool], single: bool = False) -> None:
        self.permits = permits
        self.gone = gone
        self.lane = Lane(self.acquire, single, self.gather)
        self.gathered: dict[InferenceWorker, list[TextJob]] = {}

    def acquire(self) -> None:
        """What has a permit already is computed while another one is waited for. Raises: CancelledError."""
        if self.gone():
            raise CancelledError
        try:
            self.permits.acquire_now()
        except Problem:
            self.submit()
            self.permits.acquire(self.gone)

    def gather(self, worker: InferenceWorker, job: TextJob) -> None:
        self.gathered.setdefault(worker, []).append(job)

    def submit(self) -> None:
        gathered, self.gathered = self.gathered, {}
        for worker, jobs in gathered.items():
            worker.submit(jobs)
