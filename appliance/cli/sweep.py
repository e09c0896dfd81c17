"""`appliance bench --sweep`: throughput against latency, with more and more requests in flight."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import grpc

from appliance.cli.bench import Options, Sample, Sender, make_texts, measure, open_channel, percentiles
from appliance.cli.multiplexer_client import problem_from_rpc
from appliance.core.benchmark import LEVELS, LoadStep
from appliance.core.problems import invalid
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

SHORTEST_SECS, LONGEST_SECS = 0.5, 60.0
Send = Callable[[Sequence[str]], int]


def sweep(options: Options, secs: float, hear: Callable[[LoadStep], None]) -> list[LoadStep]:
    """Measure each of LEVELS for ``secs``; hear: called with each step as it ends. The endpoint may be several, with
    commas between them, which share the calls. Raises: Problem."""
    if options.noop:
        raise invalid("--sweep measures an instance, which --noop has none of")
    if not SHORTEST_SECS <= secs <= LONGEST_SECS:
        raise invalid(f"--secs must be between {SHORTEST_SECS:g} and {LONGEST_SECS:g}")
    texts = itertools.cycle(make_texts(options))
    size = 1 if options.mode == "standard" else options.batch_size
    steps: list[LoadStep] = []
    with ExitStack() as stack:
        senders = [
            Sender(TeiMultiplexerStub(stack.enter_context(open_channel(replace(options, endpoint=endpoint)))), options)
            for endpoint in options.endpoint.split(",")
        ]
        sends = [getattr(sender, options.mode) for sender in senders]
        for send in sends:  # what is computed for the first time takes longer
            begin(send, next(texts))
        for level in LEVELS:
            steps.append(step(sends, lambda: list(itertools.islice(texts, size)), level, secs))
            hear(steps[-1])
    return steps


def begin(send: Send, text: str) -> None:
    """Raises: Problem, where no call can be answered."""
    try:
        send([text])
    except grpc.RpcError as error:
        raise problem_from_rpc(error) from error


def step(sends: Sequence[Send], take: Callable[[], Sequence[str]], level: int, secs: float) -> LoadStep:
    """level: requests in flight. take: the texts of the next request."""
    samples: list[Sample] = []
    lock = threading.Lock()
    began = time.perf_counter()

    def worker(number: int) -> None:
        send = sends[number % len(sends)]
        while time.perf_counter() - began < secs:
            with lock:
                texts = take()
            samples.append(measure(send, texts, began))

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(level)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summary(level, samples, time.perf_counter() - began)


def summary(level: int, samples: Sequence[Sample], secs: float) -> LoadStep:
    cuts = percentiles(samples)
    return LoadStep(
        concurrency=level,
        texts_per_sec=round(sum(sample.answered for sample in samples) / secs, 1),
        p50_ms=round(cuts[49], 2),
        p95_ms=round(cuts[94], 2),
        requests=len(samples),
        failed=sum(sample.error is not None for sample in samples),
        first_error=next((sample.error for sample in samples if sample.error), None),
    )


def line(step: LoadStep) -> str:
    """As a person reads it."""
    failed = f", {step.failed} failed: {step.first_error}" if step.failed else ""
    took = f"p50 {step.p50_ms:.1f} ms, p95 {step.p95_ms:.1f} ms"
    return f"{step.concurrency:>3} in flight: {step.texts_per_sec:>8.1f} texts/s, {took}{failed}"
