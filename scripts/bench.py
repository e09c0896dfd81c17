"""`make bench`: what the appliance costs, always against the direct path in the same run. Prints ratios.

    python scripts/bench.py [engine] [control] [multiplexer] [load] [gateway] [crashloop] [neighbours] [single] [cache]
        [console] [families] [gpu] [images] [hybrid] [cluster]

Machines are noisy: candidates take turns, each number is the median over ROUNDS, and ratios are medians of the ratios
of one round. Nothing here decides a test.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import orjson
import psutil
import requests

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.core.instance import InstanceSpec  # noqa: E402
from appliance.core.program import MARKER, marker  # noqa: E402
from appliance.core.state import Instance, with_instance  # noqa: E402
from appliance.drivers import ports  # noqa: E402
from appliance.drivers.statefile import StateFile  # noqa: E402
from appliance.node.context import node_id  # noqa: E402
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from appliance.wire.tei.v1.tei_pb2_grpc import EmbedStub  # noqa: E402
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux  # noqa: E402
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub  # noqa: E402
from scripts.bench_cache import cache  # noqa: E402
from scripts.bench_cluster import cluster  # noqa: E402
from scripts.bench_console import console  # noqa: E402
from scripts.bench_families import families  # noqa: E402
from scripts.bench_gpu import gpu  # noqa: E402
from scripts.bench_http import http  # noqa: E402
from scripts.bench_hybrid import hybrid  # noqa: E402
from scripts.bench_images import images  # noqa: E402
from scripts.bench_neighbours import neighbours  # noqa: E402
from scripts.bench_pipe import BENCH_PYTHON, Reference  # noqa: E402
from scripts.bench_single import single  # noqa: E402
from testing.arrows import dense_request  # noqa: E402
from testing.arrows import rows as arrow_rows  # noqa: E402
from testing.engines import Engine  # noqa: E402
from testing.running import MINILM, RunningAppliance, eventually, free_ports  # noqa: E402
from testing.texts import mixed_texts  # noqa: E402

ROUNDS = 3
SHORT_CALLS = 100
TEXTS = mixed_texts(1000)


def rows(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    print(f"\n{title}")
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


def median_ratio(ours: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# -- engine -----------------------------------------------------------------------------------------------------------


def stream(engine: Engine) -> np.ndarray:
    requests = (tei.EmbedRequest(inputs=text, truncate=True) for text in TEXTS)
    return np.array([reply.embeddings for reply in engine.stub("Embed").EmbedStream(requests)], np.float32)


def short(engine: Engine) -> list[float]:
    stub, request = engine.stub("Embed"), tei.EmbedRequest(inputs="a short query")
    return [timed(lambda: stub.Embed(request)) for _ in range(SHORT_CALLS)]


def bench_engine(room: Path) -> None:
    """1,000 mixed texts (mean 54 tokens, at most 256) on one stream, and one short text; two threads, one client."""
    kinds = {
        "ours": (),
        "ours, arrival order (TEI's rule, batches of 8)": ("--arrival-order", "--max-batch-requests", "8"),
        "ours, openvino float32": ("--runtime", "openvino"),
        "ours, openvino bfloat16": ("--runtime", "openvino", "--dtype", "bfloat16"),
    }
    if not {"amx_bf16", "avx512_bf16"}.intersection(Path("/proc/cpuinfo").read_text().split()):
        print("This CPU has no bfloat16 units: not measured")
        del kinds["ours, openvino bfloat16"]
    engines = {}
    for name, flags in kinds.items():
        engines[name] = Engine(room, MINILM, *flags)
        engines[name].command[0] = BENCH_PYTHON
        engines[name].__enter__()
    reference = Reference()
    seconds: dict[str, list[float]] = {}
    latency: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):  # the first turn warms everything up and is not counted
        found = {f"sentence-transformers, batches of {size}": reference.job(batch=size)[0] for size in (32, 8, 16)}
        found |= {name: timed(lambda engine=engine: stream(engine)) for name, engine in engines.items()}
        waits = {"sentence-transformers, batches of 32": reference.job(batch=1, short=SHORT_CALLS)}
        waits |= {name: short(engine) for name, engine in engines.items()}
        if turn:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
            for name, values in waits.items():
                latency.setdefault(name, []).append(statistics.median(values))
    default = seconds["sentence-transformers, batches of 32"]
    best = min((value for name, value in seconds.items() if name.startswith("sent")), key=statistics.median)
    base = latency["sentence-transformers, batches of 32"]
    lines: list[tuple[str, ...]] = [("", "texts/s", "x ST default", "x ST best", "short ms", "x ST", "cosine")]
    ours = stream(engines["ours"])
    for name, values in seconds.items():
        vectors = stream(engines[name]) if name in engines else ours
        cosine = f"{(vectors * ours).sum(axis=1).min():.6f}" if name in engines else "-"
        wait = latency.get(name)
        lines.append(
            (
                name,
                f"{len(TEXTS) / statistics.median(values):.0f}",
                median_ratio(default, values),
                median_ratio(best, values),
                f"{statistics.median(wait) * 1000:.2f}" if wait else "-",
                median_ratio(wait, base) if wait else "-",
                cosine,
            )
        )
    for engine in engines.values():
        engine.__exit__(None, None, None)
    reference.process.kill()
    rows(f"engine: 1,000 mixed texts, median of {ROUNDS} turns; cosine: lowest, to ours", lines)


# -- control ----------------------------------------------------------------------------------------------------------


def bench_control(room: Path) -> None:
    """POST /instances to its 201; engine port open to routable; kill -9 to answering again."""
    created, routable, back = [], [], []
    with RunningAppliance(room) as running:
        running.wait_ready("minilm")
        request = tei.EmbedRequest(inputs="x")
        for turn in range(10):
            created.append(timed(lambda turn=turn: running.create(f"bench-{turn}", model_id=MINILM)))
            routable.append(open_to_routable(running, f"bench-{turn}"))
            running.delete(f"/instances/bench-{turn}")
        for _ in range(5):
            running.processes_of("minilm")[0].kill()
            began = time.perf_counter()
            eventually(lambda: not answers(running, "minilm", request), timeout=5, every=0.001)
            eventually(lambda: answers(running, "minilm", request), timeout=30, every=0.01)
            back.append(time.perf_counter() - began)
            time.sleep(6)  # past startsecs, so that each death is the first of its kind
    lines: list[tuple[str, ...]] = [("", "median s", "worst s")]
    for name, values in (
        ("POST /instances to 201", created),
        ("engine port open to routable", routable),
        ("kill -9 of a replica to answering again, model load included", back),
    ):
        lines.append((name, f"{statistics.median(values):.3f}", f"{max(values):.3f}"))
    rows("control: one idle machine", lines)


def answers(running: RunningAppliance, name: str, request: tei.EmbedRequest) -> bool:
    try:
        target = mux.Target(instance_name=name)
        running.stub().Embed(mux.EmbedRequest(target=target, request=request), timeout=5)
    except grpc.RpcError:
        return False
    return True


def open_to_routable(running: RunningAppliance, name: str) -> float:
    port = running.instance(name)["port"]
    eventually(lambda: ports.answers("127.0.0.1", port), timeout=30, every=0.005)
    began = time.perf_counter()
    eventually(lambda: answers(running, name, tei.EmbedRequest(inputs="x")), timeout=10, every=0.005)
    return time.perf_counter() - began


# -- multiplexer ------------------------------------------------------------------------------------------------------


def bench_multiplexer(room: Path) -> None:
    """2,000 mixed texts as one Arrow call, against the same texts in order on one stream straight to the engine."""
    texts = mixed_texts(2000, seed=17)
    half = len(texts) // 2
    lines: list[tuple[str, ...]] = [("", "direct texts/s", "Arrow texts/s", "ratio")]
    kinds: dict[str, dict[str, object]] = {
        "engine batches in arrival order, as TEI": {"extra_args": ["--arrival-order"]},
        "engine batches by length": {},
        "two replicas, against two direct streams at once": {"replicas": 2},
    }
    with RunningAppliance(room, seeds="") as running:
        for label, fields in kinds.items():
            running.create("one", model_id=MINILM, **fields)  # alone on the machine: engines share its cores
            serving = [replica["port"] for replica in running.wait_ready("one")["replica_list"]]
            parts = (texts,) if len(serving) == 1 else (texts[:half], texts[half:])
            direct, arrow = paired(
                lambda serving=serving, parts=parts: direct_streams(serving, parts),
                lambda: as_arrow(running, "one", texts),
            )
            rate = [f"{len(texts) / statistics.median(values):.0f}" for values in (direct, arrow)]
            lines.append((label, *rate, median_ratio(direct, arrow)))
            if label == "engine batches by length":
                bench_unary(running, serving[0])
            running.delete("/instances/one")
        rows(f"multiplexer: 2,000 mixed texts, median of {ROUNDS} turns", lines)
    bench_stub(room / "stub")


def paired(one: Callable[[], object], other: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds of both, in turns."""
    found = [(timed(one), timed(other)) for _ in range(ROUNDS)]
    return [first for first, _ in found], [second for _, second in found]


def direct_streams(serving: list[int], parts: tuple[list[str], ...]) -> None:
    """Each part in order on one EmbedStream straight to one engine, all at once."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(direct_stream, serving, parts))


def direct_stream(port: int, texts: list[str]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        requests = (tei.EmbedRequest(inputs=text, truncate=True, normalize=True) for text in texts)
        assert sum(1 for _ in EmbedStub(channel).EmbedStream(requests)) == len(texts)


def as_arrow(running: RunningAppliance, name: str, texts: list[str]) -> None:
    reply = running.stub().EmbedArrow(dense_request(name, list(texts)), timeout=600)
    assert arrow_rows(reply).num_rows == len(texts)


def bench_unary(running: RunningAppliance, port: int) -> None:
    request = tei.EmbedRequest(inputs="a short query", truncate=True)
    wrapped = mux.EmbedRequest(target=mux.Target(instance_name="one"), request=request)
    direct, through = EmbedStub(grpc.insecure_channel(f"127.0.0.1:{port}")), running.stub()
    waits: tuple[list[float], list[float]] = ([], [])
    for _ in range(10):
        waits[0].extend(timed(lambda: direct.Embed(request)) for _ in range(50))
        waits[1].extend(timed(lambda: through.Embed(wrapped)) for _ in range(50))
    lines: list[tuple[str, ...]] = [("", "direct ms", "through ms", "added ms")]
    for name, cut in (("p50", 50), ("p99", 99)):
        one, two = (float(np.percentile(values, cut)) * 1000 for values in waits)
        lines.append((f"unary Embed of one short text, {name}", f"{one:.2f}", f"{two:.2f}", f"{two - one:.2f}"))
    rows("multiplexer: added latency, one caller", lines)


def bench_stub(room: Path) -> None:
    """CPU of the multiplexer process alone, with a replica that answers at once; beside it that of the replica.

    The replica is a bare grpcio server, called directly for this: less than its price no call through grpcio can cost.
    """
    room.mkdir()
    stub_port, *own = free_ports(4)
    spec = InstanceSpec("stub", "stub", max_concurrent_requests=4096)
    instance = Instance(spec, (stub_port,), (stub_port + 1,), created_at="now")
    StateFile(room / "state.toml", now=str, on_repair=print).update(lambda state: with_instance(state, instance))
    variables = ("TEI_MANAGER_API_PORT", "TEI_MANAGER_GRPC_PORT", "TEI_MANAGER_HTTP_PORT")
    environ = {**os.environ, "TEI_MANAGER_DATA_DIR": str(room), **{key: str(port) for key, port in zip(variables, own)}}
    bears = {
        MARKER: marker(node_id(str(room)), "stub", 0, instance.launch)
    }  # or the multiplexer takes it for a stranger
    command = [sys.executable, str(ROOT / "scripts" / "bench_stub.py"), str(stub_port)]
    stub = subprocess.Popen(command, env=environ | bears)
    with (room / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "appliance.multiplexer"], env=environ, stdout=log)
    try:
        calls = TeiMultiplexerStub(grpc.insecure_channel(f"127.0.0.1:{own[1]}"))
        single = mux.EmbedRequest(target=mux.Target(instance_name="stub"), request=tei.EmbedRequest(inputs="x"))
        eventually(lambda: calls.Embed(single, timeout=5))
        bare = EmbedStub(grpc.insecure_channel(f"127.0.0.1:{stub_port}"))
        texts = [f"text number {number}" for number in range(5000)]
        batch, small = dense_request("stub", texts), dense_request("stub", texts[:8])
        messages = [tei.EmbedRequest(inputs=text) for text in texts]
        with ThreadPoolExecutor(16) as pool:
            many = lambda call, request: list(pool.map(lambda _: call(request), range(500)))  # noqa: E731
            works: dict[str, tuple[Callable[[], object], Callable[[], object], int, int]] = {
                "one Arrow row; a message of a stream": (
                    lambda: calls.EmbedArrow(batch),
                    lambda: list(bare.EmbedStream(iter(messages))),
                    3,
                    5000,
                ),
                "one call of 8 Arrow rows, 16 callers; a stream of 8 messages": (
                    lambda: many(calls.EmbedArrow, small),
                    lambda: many(lambda some: list(bare.EmbedStream(iter(some))), messages[:8]),
                    1,
                    500,
                ),
                "one unary call, one caller": (lambda: calls.Embed(single), lambda: bare.Embed(messages[0]), 1000, 1),
                "one unary call, 16 callers": (
                    lambda: many(calls.Embed, single),
                    lambda: many(bare.Embed, messages[0]),
                    3,
                    500,
                ),
            }
            lines: list[tuple[str, ...]] = [("", "CPU microseconds", "a second", "bare grpcio server", "ratio")]
            for label, (through, direct, times, units) in works.items():
                turns = [
                    (cpu(process.pid, through, times, units), cpu(stub.pid, direct, times, units))
                    for _ in range(ROUNDS)
                ]
                ours, theirs = ([part[0] for part in parts] for parts in zip(*turns, strict=True))
                rate = statistics.median(part[0][1] for part in turns)
                middles = [f"{statistics.median(values):.0f}" for values in (ours, theirs)]
                lines.append((label, middles[0], f"{rate:.0f}", middles[1], median_ratio(ours, theirs)))
        rows(f"multiplexer: CPU in its own process, replica that answers at once, median of {ROUNDS} turns", lines)
    finally:
        process.kill()
        stub.kill()


def cpu(pid: int, work: Callable[[], object], times: int, units: int) -> tuple[float, float]:
    """(CPU microseconds of process ``pid`` for one unit, units a second)."""
    work()
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    for _ in range(times):
        work()
    used, took = sum(process.cpu_times()[:2]) - before, time.perf_counter() - began
    return used / times / units * 1e6, times * units / took


# -- gateway ----------------------------------------------------------------------------------------------------------


def bench_gateway(room: Path) -> None:
    """One text and 1,000 over HTTP, against the same over gRPC, and against a plain handler."""
    with RunningAppliance(room) as running:
        running.wait_ready("minilm")
        [plain_port] = free_ports(1)
        command = [sys.executable, str(ROOT / "scripts" / "bench_plain.py"), str(plain_port)]
        plain = subprocess.Popen([*command, f"127.0.0.1:{running.grpc_port}", "minilm"], stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: ports.answers("127.0.0.1", plain_port))
            one_text(running)
            many_texts(running, plain, plain_port)
        finally:
            plain.terminate()
            plain.wait()


def one_text(running: RunningAppliance) -> None:
    request = mux.EmbedRequest(
        target=mux.Target(instance_name="minilm"), request=tei.EmbedRequest(inputs="a short query", truncate=True)
    )
    stub, session = running.stub(), requests.Session()
    url = f"http://127.0.0.1:{running.http_port}/embed"
    waits: tuple[list[float], list[float]] = ([], [])
    for _ in range(10):
        waits[0].extend(timed(lambda: stub.Embed(request)) for _ in range(50))
        waits[1].extend(timed(lambda: session.post(url, json={"inputs": "a short query"}).content) for _ in range(50))
    lines: list[tuple[str, ...]] = [("", "gRPC ms", "HTTP ms", "added ms")]
    for name, cut in (("p50", 50), ("p99", 99)):
        one, two = (float(np.percentile(values, cut)) * 1000 for values in waits)
        lines.append((name, f"{one:.2f}", f"{two:.2f}", f"{two - one:.2f}"))
    rows("gateway: one short text, one caller", lines)


def many_texts(running: RunningAppliance, plain: "subprocess.Popen[bytes]", plain_port: int) -> None:
    texts = list(TEXTS)
    session = requests.Session()

    def post(port: int, **options: str) -> None:
        body = {"input": texts, "model": "minilm", **options}
        reply = session.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body)
        assert len(orjson.loads(reply.content)["data"]) == len(texts)

    kinds: dict[str, Callable[[], None]] = {
        "one Arrow call": lambda: as_arrow(running, "minilm", texts),
        "OpenAI, float": lambda: post(running.http_port),
        "OpenAI, base64": lambda: post(running.http_port, encoding_format="base64"),
        "plain Falcon handler, float": lambda: post(plain_port),
    }
    processes = running.processes_of("gateway") + [psutil.Process(plain.pid), *psutil.Process(plain.pid).children()]
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    used: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):  # the first turn warms up
        for name, work in kinds.items():
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            took = timed(work)
            if turn:
                seconds[name].append(took)
                used[name].append(sum(sum(process.cpu_times()[:2]) for process in processes) - before)
    base = seconds["one Arrow call"]
    lines: list[tuple[str, ...]] = [("", "texts/s", "x Arrow", "CPU ms in the HTTP process")]
    for name, values in seconds.items():
        cpu_ms = "-" if name == "one Arrow call" else f"{statistics.median(used[name]) * 1000:.0f}"
        lines.append((name, f"{len(texts) / statistics.median(values):.0f}", median_ratio(base, values), cpu_ms))
    rows(f"gateway: 1,000 mixed texts, median of {ROUNDS} turns", lines)


# -- load -------------------------------------------------------------------------------------------------------------

BULK_SECS, FITTING_SECS, OVERLOAD_SECS = 30, 10, 60
Found = dict[str, float]  # what scripts/bench_callers.py prints


def bench_load(room: Path) -> None:
    """Single texts beside a large batch, and three times as many callers as there is room for."""
    settings = "[queue]\nmax_size = 64"
    with RunningAppliance(room, seeds="", settings=settings) as running:
        running.create("one", model_id=MINILM, max_concurrent_requests=64)
        running.wait_ready("one")
        beside_bulk(running)
        overload(running)


def beside_bulk(running: RunningAppliance) -> None:
    single = mux.EmbedRequest(
        target=mux.Target(instance_name="one"), request=tei.EmbedRequest(inputs="a short query", truncate=True)
    )
    stub = running.stub()
    idle = [timed(lambda: stub.Embed(single)) for _ in range(500)]
    job = running.stub().EmbedArrow.future(dense_request("one", list(mixed_texts(20_000, seed=23))), timeout=600)
    ended, busy = time.monotonic() + BULK_SECS, []
    while time.monotonic() < ended and not job.done():
        busy.append(timed(lambda: stub.Embed(single)))
        time.sleep(0.02)
    job.cancel()
    lines: list[tuple[str, ...]] = [("", "idle ms", "beside an Arrow job ms", "ratio")]
    for name, cut in (("p50", 50), ("p99", 99)):
        one, two = (float(np.percentile(values, cut)) * 1000 for values in (idle, busy))
        lines.append((name, f"{one:.1f}", f"{two:.1f}", f"{two / one:.1f}"))
    rows(f"load: one short text, {len(busy)} times over {BULK_SECS} s", lines)


def overload(running: RunningAppliance) -> None:
    """Three times as many callers as the replica takes, then as it and its queue hold; between them those that fit."""
    process = psutil.Process(running.processes_of("multiplexer")[0].pid)
    before, memory = process.memory_info().rss, [0]
    fit, counts = 64, (3 * 64, 3 * (64 + 64))
    found: dict[int, list[Found]] = {count: [] for count in (fit, *counts)}
    alone: dict[int, list[Found]] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        for count in counts:
            found[fit].append(called(callers(running, fit, FITTING_SECS)))
            beside = callers(running, 1, OVERLOAD_SECS, "--pause", "0.05")
            many = callers(running, count, OVERLOAD_SECS)
            while many.poll() is None:
                memory.append(process.memory_info().rss)
                time.sleep(0.5)
            found[count].append(called(many))
            alone[count].append(called(beside))
    found[fit].append(called(callers(running, fit, FITTING_SECS)))
    overload_table(found, alone)
    time.sleep(5)
    grown = [(value - before) / 1e6 for value in (max(memory), process.memory_info().rss)]
    print(f"  memory of the multiplexer: {grown[0]:+.0f} MB at most, {grown[1]:+.0f} MB five seconds after the end")


def overload_table(found: dict[int, list[Found]], alone: dict[int, list[Found]]) -> None:
    """found: by number of callers, in turns, first those that fit; alone: one more caller beside those that do not."""
    rate = {count: [part["answered"] / part["seconds"] for part in parts] for count, parts in found.items()}
    fit, *counts = rate
    lines: list[tuple[str, ...]] = [
        ("callers", "texts/s", "of the peaks", "refusals", "ms to one: p50", "p99", "one more caller: p50", "p99")
    ]
    lines.append((str(fit), f"{statistics.median(rate[fit]):.0f}", "", "0", *"----"))
    for at, count in enumerate(counts):
        around = [statistics.mean(rate[fit][turn : turn + 2]) for turn in range(at, at + 2 * ROUNDS, 2)]
        share = median_ratio(rate[count], around)
        refusals = str(sum(part["refused"] for part in found[count]))
        waits = [f"{middle(parts[count], key):.0f}" for parts in (found, alone) for key in ("p50", "p99")]
        lines.append((str(count), f"{statistics.median(rate[count]):.0f}", share, refusals, *waits))
    unnamed = sum(part["unnamed"] for parts in (*found.values(), *alone.values()) for part in parts)
    rows(f"load: overload, {ROUNDS} times {OVERLOAD_SECS} s; {unnamed:.0f} refusals without retry-after-ms", lines)


def middle(parts: list[Found], key: str) -> float:
    """The median over the rounds, of those that had any."""
    return statistics.median([part[key] for part in parts if part[key] is not None] or [0.0])


def callers(running: RunningAppliance, count: int, seconds: float, *flags: str) -> subprocess.Popen:
    """A process of their own, so that what a refusal takes is not the work of whoever measures it."""
    script = str(ROOT / "scripts" / "bench_callers.py")
    command = [sys.executable, script, str(running.grpc_port), str(count), str(seconds), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def called(process: subprocess.Popen) -> Found:
    return json.loads(process.communicate()[0])


# -- a neighbour that crashes again and again -------------------------------------------------------------------------


CRASH_TURNS = 4


def bench_crashloop(room: Path) -> None:
    """Single texts to one instance, calm and beside an instance that dies at every start until it is quarantined."""
    with RunningAppliance(room, settings="health_check_interval_secs = 1") as running:
        running.wait_ready("minilm")
        request = mux.EmbedRequest(
            target=mux.Target(instance_name="minilm"), request=tei.EmbedRequest(inputs="a short query", truncate=True)
        )
        stub = running.stub()
        calm: list[float] = []
        beside: list[float] = []
        spans = []

        def measure(into: list[float]) -> None:
            into.append(timed(lambda: stub.Embed(request)))
            time.sleep(0.01)

        for _ in range(CRASH_TURNS):
            running.create("crashing", model_id="nobody/nothing")
            began = time.monotonic()
            while running.instance("crashing")["status"] != "failed":
                for _ in range(50):
                    measure(beside)
            spans.append(time.monotonic() - began)
            running.delete("/instances/crashing")
            ended = time.monotonic() + spans[-1]
            while time.monotonic() < ended:
                running.instance("minilm")
                for _ in range(50):
                    measure(calm)
    lines: list[tuple[str, ...]] = [("", "calm ms", "beside a crash loop ms", "ratio")]
    for name, cut in (("p50", 50), ("p99", 99)):
        one, two = (float(np.percentile(values, cut)) * 1000 for values in (calm, beside))
        lines.append((name, f"{one:.2f}", f"{two:.2f}", f"{two / one:.2f}"))
    words = f"{len(calm)} and {len(beside)} texts, failed after {statistics.median(spans):.0f} s (median)"
    rows(f"crash loop: {words}", lines)


def bench_neighbours(room: Path) -> None:
    rows("an embedded engine beside others, ratios to the same alone: texts/s, and p50", neighbours(room))


def bench_cache(room: Path) -> None:
    for title, lines in cache(room):
        rows(title, lines)


def bench_single(room: Path) -> None:
    for title, lines in single(room).items():
        rows(title, lines)


def bench_console(room: Path) -> None:
    rows("the console, where a hundred instances run", console(room))


def bench_http(room: Path) -> None:
    rows("single texts over HTTP", http(room))


def bench_hybrid(room: Path) -> None:
    rows("hybrid, beside its parts", hybrid(room))


def bench_cluster(room: Path) -> None:
    for callers, lines in cluster(room / "cluster").items():
        rows(f"a multiplexer and where its replicas are, {callers}", lines)


def bench_families(room: Path) -> None:
    rows("families, beside sentence-transformers", families(room))


def bench_gpu(room: Path) -> None:
    rows("on a GPU, beside sentence-transformers", list(gpu(room)))


def bench_images(room: Path) -> None:
    rows("images a second, beside transformers", images(room))


PARTS = {
    "engine": bench_engine,
    "control": bench_control,
    "multiplexer": bench_multiplexer,
    "gateway": bench_gateway,
    "http": bench_http,
    "load": bench_load,
    "crashloop": bench_crashloop,
    "neighbours": bench_neighbours,
    "single": bench_single,
    "cache": bench_cache,
    "console": bench_console,
    "families": bench_families,
    "gpu": bench_gpu,
    "images": bench_images,
    "hybrid": bench_hybrid,
    "cluster": bench_cluster,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder))
