"""What the engine counts, under TEI's names, types, labels and buckets, so that dashboards made for TEI work unchanged.

Two known faults of TEI 1.9 are not copied: no request is counted twice, and no empty batch is recorded.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from appliance.core.problems import Problem
from appliance.engine.histogram import Histogram

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
KINDS = ("embed", "predict")  # of inputs


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
    """The metrics of one engine process. All durations are seconds, lengths are tokens. kinds: of the inputs that the
    model can answer; the durations of others are nothing to show."""

    def __init__(self, max_tokens: int, kinds: Collection[str] = KINDS) -> None:
        prometheus_client.disable_created_metrics()
        self.tallies, self.histograms = CollectorRegistry(), list[Histogram]()
        self.work = CollectorRegistry()  # what the monitor reads with each probe, with `batch_tokens`
        self.requests = self.counter("te_request_count", "Requests", "method")
        self.successes = self.counter("te_request_success", "Requests answered", "method")
        self.failures = self.counter("te_request_failure", "Requests or inputs refused or failed", "err")
        self.counts = {kind: self.counter(f"te_{kind}_count", "Inputs") for kind in KINDS}
        self.dones = {kind: self.counter(f"te_{kind}_success", "Inputs answered") for kind in KINDS}
        self.durations = {
            kind: [self.histogram(f"te_{kind}{part}_duration", "Seconds", DURATIONS) for part in PARTS]
            for kind in ("request", *kinds)
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
        for each in (self.successes, self.failures, *self.counts.values(), *self.dones.values()):
            self.work.register(each)

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.tallies)

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        self.histograms.append(Histogram(name, help, buckets))
        return self.histograms[-1]

    def measured(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A gauge whose value is computed at each scrape."""
        gauge = Gauge(name, help, registry=self.tallies)
        gauge.set_function(value)
        self.work.register(gauge)

    @contextmanager
    def batch(self, lengths: Sequence[int]) -> Iterator[None]:
        """Count a batch of texts of these lengths, for as long as the block computes it."""
        self.batch_size.observe(len(lengths))
        self.batch_tokens.observe(sum(lengths))
        with self.batches.computing(len(lengths), sum(lengths)):
            yield

    def input_done(self, kind: str, seconds: Sequence[float]) -> None:
        """Count one input that was answered. seconds: total, tokenization, queue, inference."""
        self.dones[kind].inc()
        self.observe(self.durations[kind], seconds)

    def request_done(self, method: str, seconds: Sequence[float]) -> None:
        self.successes.labels(method).inc()
        self.observe(self.durations["request"], seconds)

    def observe(self, histograms: Sequence[Histogram], values: Sequence[float]) -> None:
        for histogram, value in zip(histograms, values, strict=True):
            histogram.observe(value)

    def failed(self, problem: Problem) -> None:
        self.failures.labels(ERRORS.get(problem.code, "inference")).inc()

    def text(self) -> str:
        """The Prometheus exposition. The client library puts _total behind counters; TEI's names have none."""
        return exposed(self.tallies) + "".join(each.text() for each in self.histograms)

    def work_text(self) -> str:
        """As `text`, as far as `wire.exposition.work` reads it."""
        return exposed(self.work) + self.batch_tokens.text()


def exposed(registry: CollectorRegistry) -> str:
    return re.sub(r"\b(te_\w+?)_total\b", r"\1", prometheus_client.generate_latest(registry).decode())
