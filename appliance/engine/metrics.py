"""What the engine counts, under TEI's names, types, labels and buckets, so that dashboards made for TEI work unchanged.

Two known faults of TEI 1.9 are not copied: no request is counted twice, and no empty batch is recorded.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from appliance.core.problems import Problem

DURATIONS = [1.5e-5 * 1.5**power for power in range(35)]
POWERS = [2**power for power in range(21)]
ERRORS = {
    "VALIDATION_ERROR": "validation",
    "TOKENIZER": "tokenization",
    "OVERLOADED": "overloaded",
    "MODEL_TYPE": "model_type",
    "BATCH_SIZE": "batch_size",
    "BACKEND": "inference",
    "DROPPED": "dropped",
}
PARTS = ("", "_tokenization", "_queue", "_inference")


class Batch(NamedTuple):
    """A batch that is being computed. began_at: by time.monotonic."""

    began_at: float
    texts: int
    tokens: int


class RunningBatches:
    """The batches in progress, and the total cost of those that were computed. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[int, Batch] = {}
        self.count = 0
        self.seconds, self.tokens = 0.0, 0  # of all that were computed

    @contextmanager
    def computing(self, texts: int, tokens: int) -> Iterator[None]:
        """Count one batch as running. The time of a batch that fails is not added to the cost: it predicts nothing."""
        began_at = time.monotonic()
        with self.lock:
            self.count += 1
            number = self.count
            self.running[number] = Batch(began_at, texts, tokens)
        try:
            yield
            with self.lock:
                self.seconds += time.monotonic() - began_at
                self.tokens += tokens
        finally:
            with self.lock:
                del self.running[number]

    def running_texts(self) -> int:
        with self.lock:
            return sum(batch.texts for batch in self.running.values())

    def running_tokens(self) -> int:
        with self.lock:
            return sum(batch.tokens for batch in self.running.values())

    def oldest_secs(self) -> float:
        with self.lock:
            now = time.monotonic()
            return max((now - batch.began_at for batch in self.running.values()), default=0.0)

    def token_secs(self) -> float:
        """Seconds of computing for each token, so far; 0 before the first batch."""
        with self.lock:
            return self.seconds / self.tokens if self.tokens else 0.0


class EngineMetrics:
    """The metrics of one engine process. All durations are seconds, lengths are tokens."""

    def __init__(self, max_tokens: int) -> None:
        prometheus_client.disable_created_metrics()
        self.tallies, self.histograms = CollectorRegistry(), CollectorRegistry()
        self.work = CollectorRegistry()  # what the monitor reads with each probe: a tenth of all
        self.numbers = itertools.count(1)
        self.observation = 0  # the number of the last one
        self.kept = (-1, "")  # the text of the histograms, and after which observation
        self.requests = self.counter("te_request_count", "Requests", "method")
        self.successes = self.counter("te_request_success", "Requests answered", "method")
        self.failures = self.counter("te_request_failure", "Requests or inputs refused or failed", "err")
        self.counts = {kind: self.counter(f"te_{kind}_count", "Inputs") for kind in ("embed", "predict")}
        self.dones = {kind: self.counter(f"te_{kind}_success", "Inputs answered") for kind in ("embed", "predict")}
        self.durations = {
            kind: [self.histogram(f"te_{kind}{part}_duration", "Seconds", DURATIONS) for part in PARTS]
            for kind in ("request", "embed", "predict")
        }
        lengths = [2**power for power in range(20) if 2**power <= max_tokens]
        self.input_length = self.histogram("te_request_input_length", "Tokens of an input", lengths)
        self.batch_size = self.histogram("te_batch_next_size", "Inputs of a batch", POWERS[:13])
        self.batch_tokens = self.histogram("te_batch_next_tokens", "Tokens of a batch", POWERS)
        self.queue_size = Gauge("te_queue_size", "Inputs that wait", registry=self.tallies)
        # Not TEI's: by these the monitor knows a long forward pass from a hang.
        self.batches = batches = RunningBatches()
        self.measured("te_batch_running_size", "Inputs of the batches in progress", batches.running_texts)
        self.measured("te_batch_running_tokens", "Tokens of the batches in progress", batches.running_tokens)
        self.measured("te_batch_running_duration", "Seconds since the oldest of them began", batches.oldest_secs)
        self.measured("te_batch_token_duration", "Seconds of computing for a token, so far", batches.token_secs)
        for each in (self.successes, self.failures, *self.counts.values(), *self.dones.values(), self.batch_tokens):
            self.work.register(each)

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.tallies)

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self.histograms)

    def observe(self, *observed: tuple[Histogram, float]) -> None:
        for histogram, value in observed:
            histogram.observe(value)
        self.observation = next(self.numbers)  # each number once, also with several threads

    def measured(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A gauge whose value is computed at each scrape."""
        gauge = Gauge(name, help, registry=self.tallies)
        gauge.set_function(value)
        self.work.register(gauge)

    @contextmanager
    def batch(self, lengths: Sequence[int]) -> Iterator[None]:
        """Count a batch of texts of these lengths, for as long as the block computes it."""
        self.observe((self.batch_size, len(lengths)), (self.batch_tokens, sum(lengths)))
        with self.batches.computing(len(lengths), sum(lengths)):
            yield

    def input_done(self, kind: str, seconds: Sequence[float]) -> None:
        """Count one input that was answered. seconds: total, tokenization, queue, inference."""
        self.dones[kind].inc()
        self.observe(*zip(self.durations[kind], seconds, strict=True))

    def request_done(self, method: str, seconds: Sequence[float]) -> None:
        self.successes.labels(method).inc()
        self.observe(*zip(self.durations["request"], seconds, strict=True))

    def failed(self, problem: Problem) -> None:
        self.failures.labels(ERRORS.get(problem.code, "inference")).inc()

    def text(self) -> str:
        """The Prometheus exposition. The client library puts _total behind counters; TEI's names have none.

        The histograms are nearly all of it, and 4 ms of CPU: their text is kept while nothing is observed.
        """
        observation, (kept_after, histograms) = self.observation, self.kept
        if kept_after != observation:
            histograms = exposed(self.histograms)
            self.kept = (observation, histograms)
        return exposed(self.tallies) + histograms

    def work_text(self) -> str:
        """As `text`, as far as `wire.exposition.work` reads it."""
        return exposed(self.work)


def exposed(registry: CollectorRegistry) -> str:
    return re.sub(r"\b(te_\w+?)_total\b", r"\1", prometheus_client.generate_latest(registry).decode())
