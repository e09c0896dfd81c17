"""`appliance bench`: how fast an instance answers over the public gRPC interface. Also an example of using it.

Three ways to send the same texts: `standard` (one unary Embed a text), `stream` (EmbedStream), `arrow` (EmbedArrow,
whole batches). A request is one text, one stream of batch_size texts, or one batch; concurrency of them are in flight.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc
import pyarrow as pa

from appliance.core.problems import Kind, Problem, invalid
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

LARGEST_MESSAGE = 2**31 - 1
SENTENCES = (
    "how do I reset my password",
    "The river was high after three days of rain, and the bridge stayed closed until the weekend.",
    "SELECT name FROM users WHERE id = 7",
    "vector search",
    "A replica that stops answering is restarted, and what it had not answered goes to another one.",
)


@dataclass
class Options:
    """What to measure. endpoint: host:port. Paths of PEM files turn TLS on."""

    endpoint: str
    instance: str
    mode: str = "standard"
    num_texts: int = 1000
    batch_size: int = 100
    concurrency: int = 8
    noop: bool = False
    texts: str | None = None
    cert: str | None = None
    key: str | None = None
    ca: str | None = None


@dataclass
class Report:
    """The result, as `--json` prints it. Latencies are milliseconds of one request."""

    mode: str
    instance_name: str
    num_texts: int
    batch_size: int
    num_requests: int
    total_duration_secs: float = 0.0
    throughput_per_sec: float = 0.0
    successful: int = 0
    failed: int = 0
    latency_ms: dict[str, float] = field(default_factory=dict)
    first_error: str | None = None


@dataclass
class Sample:
    """One request: when it ended (seconds from the start), how long it took, how many texts it answered."""

    ended_at: float
    seconds: float
    answered: int
    asked: int
    error: str | None


def run(options: Options, progress: Callable[[int, int], None]) -> tuple[Report, list[Sample]]:
    """Send all texts; progress(texts done, of all). Raises: Problem for options that contradict each other."""
    if options.noop and options.mode != "arrow":
        raise invalid("--noop exists only in --mode arrow: no other request can be answered without an instance")
    if options.num_texts < 1 or options.batch_size < 1 or options.concurrency < 1:
        raise invalid("--num-texts, --batch-size and --concurrency must be at least 1")
    texts = texts_of(options)
    size = 1 if options.mode == "standard" else options.batch_size
    work: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    pieces = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
    for piece in pieces:
        work.put(piece)
    samples: list[Sample] = []
    done = itertools.count(1)
    with channel(options) as opened:
        ask = getattr(Asker(TeiMultiplexerStub(opened), options), options.mode)
        began = time.perf_counter()

        def worker() -> None:
            while True:
                try:
                    piece = work.get_nowait()
                except queue.Empty:
                    return
                samples.append(measured(ask, piece, began))
                progress(next(done), len(pieces))

        threads = [threading.Thread(target=worker) for _ in range(min(options.concurrency, len(pieces)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = time.perf_counter() - began
    return report(options, samples, total), samples


def texts_of(options: Options) -> list[str]:
    """num_texts texts: the lines of a file, or built-in sentences, over and over; each is made distinct."""
    sentences: Sequence[str] = SENTENCES
    if options.texts:
        try:
            sentences = [line for line in Path(options.texts).read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise invalid(f"Cannot read the texts {options.texts}: {error}") from error
        if not sentences:
            raise invalid(f"The texts file {options.texts} has no line")
    endless = itertools.cycle(sentences)
    return [f"{next(endless)} {number}" for number in range(options.num_texts)]


def channel(options: Options) -> grpc.Channel:
    limits = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.max_send_message_length", LARGEST_MESSAGE)]
    files = (options.ca, options.key, options.cert)
    if not any(files):
        return grpc.insecure_channel(options.endpoint, limits)
    if bool(options.cert) != bool(options.key):
        raise invalid("--cert and --key belong together")
    try:
        ca, key, cert = (Path(file).read_bytes() if file else None for file in files)
    except OSError as error:
        raise invalid(f"Cannot read {error.filename}: {error.strerror}") from error
    return grpc.secure_channel(options.endpoint, grpc.ssl_channel_credentials(ca, key, cert), limits)


class Asker:
    """The three ways; each takes texts and returns how many vectors came back."""

    def __init__(self, stub: Any, options: Options) -> None:
        self.stub = stub
        self.noop = options.noop
        self.target = mux.Target(instance_name=options.instance)

    def request(self, text: str) -> mux.EmbedRequest:
        inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        return mux.EmbedRequest(target=self.target, request=inner)

    def standard(self, texts: Sequence[str]) -> int:
        return sum(bool(self.stub.Embed(self.request(text)).embeddings) for text in texts)

    def stream(self, texts: Sequence[str]) -> int:
        return sum(bool(reply.embeddings) for reply in self.stub.EmbedStream(map(self.request, texts)))

    def arrow(self, texts: Sequence[str]) -> int:
        batch = pa.record_batch({"text": pa.array(texts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_batch(batch)
        request = mux.EmbedArrowRequest(
            target=self.target,
            arrow_ipc=sink.getvalue().to_pybytes(),
            truncate=True,
            normalize=True,
            noop=self.noop,
        )
        with pa.ipc.open_stream(self.stub.EmbedArrow(request).arrow_ipc) as reader:
            column = reader.read_all().column("embeddings")
        return len(column) - column.null_count


def measured(ask: Callable[[Sequence[str]], int], texts: Sequence[str], began: float) -> Sample:
    start = time.perf_counter()
    try:
        answered, error = ask(texts), None
    except grpc.RpcError as failure:
        answered, error = 0, f"{failure.code().name}: {failure.details()}"
    end = time.perf_counter()
    return Sample(end - began, end - start, answered, len(texts), error)


def report(options: Options, samples: list[Sample], total: float) -> Report:
    answered = sum(sample.answered for sample in samples)
    took = sorted(sample.seconds * 1000 for sample in samples)
    cuts = quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
    return Report(
        mode=options.mode,
        instance_name=options.instance,
        num_texts=options.num_texts,
        batch_size=options.batch_size,
        num_requests=len(samples),
        total_duration_secs=round(total, 4),
        throughput_per_sec=round(answered / total, 2),
        successful=answered,
        failed=sum(sample.asked - sample.answered for sample in samples),
        latency_ms={f"p{cut}": round(cuts[cut - 1], 3) for cut in (50, 90, 95, 99)} | {"max": round(took[-1], 3)},
        first_error=next((sample.error for sample in samples if sample.error), None),
    )


def bar(done: int, total: int) -> None:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        return
    filled = 40 * done // total
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total}" + ("\n" if done == total else ""))
    sys.stderr.flush()


def plot(found: Report, samples: list[Sample], file: str) -> None:
    """Throughput over time and the spread of latencies, as a PNG. Needs the extra `plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Problem(
            Kind.INVALID, "NOT_INSTALLED", "--plot needs matplotlib: pip install 'tei-appliance[plot]'"
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    above, beside = figure.subplots(1, 2)
    edges, rates = rates_of(samples, found.total_duration_secs)
    above.step(edges, rates, where="post")
    above.set(title=f"{found.mode}: {found.throughput_per_sec:.0f} texts/s", xlabel="seconds", ylabel="texts/s", ylim=0)
    beside.hist([sample.seconds * 1000 for sample in samples], bins=40)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in found.latency_ms.items())
    beside.set(title=f"ms a request: {latency}", xlabel="ms", ylabel="requests")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise invalid(f"Cannot write {file}: {error}") from error


def rates_of(samples: list[Sample], total: float, pieces: int = 40) -> tuple[list[float], list[float]]:
    """(start of each piece of time, texts answered a second in it)."""
    width = total / pieces or 1
    counts = [0] * pieces
    for sample in samples:
        counts[min(pieces - 1, int(sample.ended_at / width))] += sample.answered
    return [number * width for number in range(pieces)], [count / width for count in counts]


def lines(found: Report) -> Iterator[str]:
    for key, value in asdict(found).items():
        shown = ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value
        yield f"{key.replace('_', ' '):<22} {'-' if shown is None else shown}"
