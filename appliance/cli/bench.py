"""`appliance bench`: how fast an instance answers over the public gRPC interface. Also an example of using it.

The same texts can be sent in three modes: `standard` (a unary Embed for each text), `stream` (EmbedStream) and `arrow`
(EmbedArrow). A request is one text, one stream of batch_size texts, or one batch of them; `concurrency` requests are in
flight at once. The cache is neither read nor written, or a second measurement would be one of the cache.
"""

from __future__ import annotations

import itertools
import queue
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import grpc
import pyarrow as pa

from appliance.cli.connection import ChannelSecurity, key_in_environment
from appliance.cli.multiplexer_client import ApiKeyInterceptor, problem_from_rpc
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.wire import arrow
from appliance.wire.certificates import names
from appliance.wire.envelope import CACHE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

FIRST_CALL_SECS = 10.0
COMPUTED = ((CACHE_KEY, "bypass"),)
SENTENCES = (
    "how do I reset my password",
    "The river was high after three days of rain, and the bridge stayed closed until the weekend.",
    "SELECT name FROM users WHERE id = 7",
    "vector search",
    "A replica that stops answering is restarted, and what it had not answered goes to another one.",
)


@dataclass
class Options:
    """What to measure. endpoint: host:port, or its URL with http or https. cert, key, ca: paths of PEM files; any of
    them turns TLS on, as https does. insecure: trust whatever certificate the server shows. security: where none of
    them is given and the endpoint is that of the configuration, which has TLS."""

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
    insecure: bool = False
    max_message_size_mb: int = 2047
    security: ChannelSecurity | None = None


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
    """One request. ended_at: seconds from the start. sent, answered: texts."""

    ended_at: float
    seconds: float
    answered: int
    sent: int
    error: str | None


class Rates(NamedTuple):
    """Throughput over time. starts: of each interval, in seconds; rates: texts answered a second in it."""

    starts: list[float]
    rates: list[float]


def run(options: Options, progress: Callable[[int, int], None]) -> tuple[Report, list[Sample]]:
    """Send all texts; progress(requests done, of all). Raises: Problem for options that contradict each other."""
    if options.noop and options.mode != "arrow":
        raise invalid("--noop exists only in --mode arrow: no other request can be answered without an instance")
    if min(options.num_texts, options.batch_size, options.concurrency) < 1:
        raise invalid("--num-texts, --batch-size and --concurrency must be at least 1")
    if not 1 <= options.max_message_size_mb <= 2047:
        raise invalid("--max-message-size-mb must be between 1 and 2047")
    texts = make_texts(options)
    size = 1 if options.mode == "standard" else options.batch_size
    requests = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
    due: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
    for request in requests:
        due.put(request)
    samples: list[Sample] = []
    done = itertools.count(1)
    with open_channel(options) as channel:
        sender = Sender(TeiMultiplexerStub(channel), options)
        if not options.noop:
            sender.refuse_unknown()
        send = getattr(sender, options.mode)
        began = time.perf_counter()

        def worker() -> None:
            while True:
                try:
                    request = due.get_nowait()
                except queue.Empty:
                    return
                samples.append(measure(send, request, began))
                progress(next(done), len(requests))

        threads = [threading.Thread(target=worker) for _ in range(min(options.concurrency, len(requests)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = time.perf_counter() - began
    return summarize(options, samples, total), samples


def make_texts(options: Options) -> list[str]:
    """num_texts texts, all distinct: lines of the file or built-in sentences, repeated with a number each."""
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


def open_channel(options: Options) -> grpc.Channel:
    """With the caller's key, if there is one. Raises: Problem for files that cannot be used, or no endpoint."""
    key, channel = key_in_environment(), open_channel_without_key(options)
    return grpc.intercept_channel(channel, ApiKeyInterceptor(key)) if key else channel


def open_channel_without_key(options: Options) -> grpc.Channel:
    """Raises: Problem for files that cannot be used, or an endpoint that is none."""
    scheme, _, rest = options.endpoint.rpartition("://")
    endpoint = rest.rstrip("/")
    if scheme not in ("", "http", "https") or not endpoint:
        raise invalid(f"--endpoint {quoted(options.endpoint)}: give host:port, http://host:port or https://host:port")
    longest = options.max_message_size_mb * 1024 * 1024
    limits = [(f"grpc.max_{way}_message_length", longest) for way in ("receive", "send")]
    files = (options.ca, options.key, options.cert)
    if own := options.security:
        return grpc.secure_channel(endpoint, own.credentials, [*limits, *own.options])
    if scheme != "https" and not any(files) and not options.insecure:
        return grpc.insecure_channel(endpoint, limits)
    if scheme == "http":
        raise invalid("--endpoint http://... is without TLS, and --cert, --key, --ca and --insecure are for TLS")
    if bool(options.cert) != bool(options.key):
        raise invalid("--cert and --key belong together")
    try:
        ca, key, cert = (Path(file).read_bytes() if file else None for file in files)
        if options.insecure:
            ca = shown_certificate(endpoint)
            server = names(ca)
            limits = [*limits, ("grpc.ssl_target_name_override", (*server.sans, server.common_name)[0])]  # type: ignore[list-item]
    except OSError as error:
        raise invalid(f"Cannot read {error.filename or endpoint}: {error.strerror or error}") from error
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), limits)


def shown_certificate(endpoint: str) -> bytes:
    """The certificate that a server shows, as PEM. Raises: OSError."""
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        raise invalid(f"--endpoint {quoted(endpoint)} has no port: give host:port")
    return ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=FIRST_CALL_SECS).encode()


class Sender:
    """A method for each mode, which sends texts and returns how many vectors came back."""

    def __init__(self, stub: Any, options: Options) -> None:
        self.stub = stub
        self.noop = options.noop
        self.target = mux.Target(instance_name=options.instance)

    def refuse_unknown(self) -> None:
        """Raises: Problem when no call can reach the instance, before thousands are sent."""
        try:
            self.stub.Info(mux.InfoRequest(target=self.target), timeout=FIRST_CALL_SECS)
        except grpc.RpcError as error:
            raise problem_from_rpc(error) from error

    def embed_request(self, text: str) -> mux.EmbedRequest:
        inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        return mux.EmbedRequest(target=self.target, request=inner)

    def standard(self, texts: Sequence[str]) -> int:
        return sum(bool(self.stub.Embed(self.embed_request(text), metadata=COMPUTED).embeddings) for text in texts)

    def stream(self, texts: Sequence[str]) -> int:
        replies = self.stub.EmbedStream(map(self.embed_request, texts), metadata=COMPUTED)
        return sum(bool(reply.embeddings) for reply in replies)

    def arrow(self, texts: Sequence[str]) -> int:
        column = self.arrow_column(texts, noop=self.noop)
        return len(column) - column.null_count

    def arrow_column(self, texts: Sequence[str], **fields: Any) -> pa.ChunkedArray:
        """The column `embeddings` for one batch. fields: more of the request. Raises: grpc.RpcError."""
        batch = pa.record_batch({"text": pa.array(texts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=arrow.WRITE_LZ4) as writer:
            writer.write_batch(batch)
        ipc = sink.getvalue().to_pybytes()
        request = mux.EmbedArrowRequest(target=self.target, arrow_ipc=ipc, truncate=True, normalize=True, **fields)
        reply = self.stub.EmbedArrow(request, metadata=COMPUTED)
        with pa.ipc.open_stream(reply.arrow_ipc, options=arrow.READ_IN_THREAD) as reader:
            return reader.read_all().column("embeddings")


def measure(send: Callable[[Sequence[str]], int], texts: Sequence[str], began: float) -> Sample:
    start = time.perf_counter()
    try:
        answered, error = send(texts), None
    except grpc.RpcError as failure:
        answered, error = 0, f"{failure.code().name}: {failure.details()}"
    end = time.perf_counter()
    return Sample(end - began, end - start, answered, len(texts), error)


def summarize(options: Options, samples: list[Sample], total: float) -> Report:
    answered = sum(sample.answered for sample in samples)
    cuts, slowest = percentiles(samples), max(sample.seconds for sample in samples) * 1000
    return Report(
        mode=options.mode,
        instance_name=options.instance,
        num_texts=options.num_texts,
        batch_size=options.batch_size,
        num_requests=len(samples),
        total_duration_secs=round(total, 4),
        throughput_per_sec=round(answered / total, 2),
        successful=answered,
        failed=sum(sample.sent - sample.answered for sample in samples),
        latency_ms={f"p{cut}": round(cuts[cut - 1], 3) for cut in (50, 90, 95, 99)} | {"max": round(slowest, 3)},
        first_error=next((sample.error for sample in samples if sample.error), None),
    )


def percentiles(samples: Sequence[Sample]) -> list[float]:
    """The 99 cuts of the requests' milliseconds: p50 stands at 49. samples: at least one."""
    latencies = [sample.seconds * 1000 for sample in samples]
    return quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99


def show_progress(done: int, total: int) -> None:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        return
    filled = 40 * done // total
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total}" + ("\n" if done == total else ""))
    sys.stderr.flush()


def plot(report: Report, samples: list[Sample], file: str) -> None:
    """Throughput over time and the spread of latencies, as a PNG. Needs the extra `plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Problem(Kind.INVALID, "NOT_INSTALLED", "--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.step(*rates_over_time(samples, report.total_duration_secs), where="post")
    left.set(
        title=f"{report.mode}: {report.throughput_per_sec:.0f} texts/s", xlabel="seconds", ylabel="texts/s", ylim=0
    )
    right.hist([sample.seconds * 1000 for sample in samples], bins=40)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in report.latency_ms.items())
    right.set(title=f"ms a request: {latency}", xlabel="ms", ylabel="requests")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise invalid(f"Cannot write {file}: {error}") from error


def rates_over_time(samples: list[Sample], total_secs: float, intervals: int = 40) -> Rates:
    width = total_secs / intervals or 1
    counts = [0] * intervals
    for sample in samples:
        counts[min(intervals - 1, int(sample.ended_at / width))] += sample.answered
    return Rates([number * width for number in range(intervals)], [count / width for count in counts])


def report_lines(report: Report) -> Iterator[str]:
    for key, value in asdict(report).items():
        shown = ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value
        yield f"{key.replace('_', ' '):<22} {'-' if shown is None else shown}"
