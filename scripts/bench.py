"""`make bench`: what the appliance costs, always against the direct path in the same run. Prints ratios.

    python scripts/bench.py [engine] [control] [multiplexer]

Machines are noisy: candidates take turns, each number is the median over ROUNDS, and ratios are medians of the ratios
of one round. Nothing here decides a test.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.wire.tei.v1 import tei_pb2 as tei  # noqa: E402
from tests.engine.serving import Engine  # noqa: E402
from tests.running import MINILM, RunningAppliance, eventually  # noqa: E402
from tests.texts import mixed_texts  # noqa: E402

ROUNDS = 3
SHORT_CALLS = 100
BENCH_PYTHON = str(ROOT / ".venv-bench" / "bin" / "python")
TEXTS = mixed_texts(1000)


def rows(title: str, lines: list[tuple[str, ...]]) -> None:
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


class Reference:
    """sentence-transformers in process, driven over a pipe."""

    def __init__(self) -> None:
        command = [BENCH_PYTHON, str(ROOT / "scripts" / "bench_reference.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def job(self, **job: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))


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
    lines = [("", "texts/s", "x ST default", "x ST best", "short ms", "x ST", "cosine")]
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
            created.append(timed(lambda turn=turn: running.create(f"bench-{turn}")))
            routable.append(open_to_routable(running, f"bench-{turn}"))
            running.delete(f"bench-{turn}")
        for _ in range(5):
            running.processes_of("minilm")[0].kill()
            began = time.perf_counter()
            eventually(lambda: not answers(running, "minilm", request), timeout=5, every=0.001)
            eventually(lambda: answers(running, "minilm", request), timeout=30, every=0.01)
            back.append(time.perf_counter() - began)
            time.sleep(6)  # past startsecs, so that each death is the first of its kind
    lines = [("", "median s", "worst s")]
    for name, values in (
        ("POST /instances to 201", created),
        ("engine port open to routable", routable),
        ("kill -9 of a replica to answering again, model load included", back),
    ):
        lines.append((name, f"{statistics.median(values):.3f}", f"{max(values):.3f}"))
    rows("control: one idle machine", lines)


def answers(running: RunningAppliance, name: str, request: tei.EmbedRequest) -> bool:
    from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

    try:
        target = mux.Target(instance_name=name)
        running.stub().Embed(mux.EmbedRequest(target=target, request=request), timeout=5)
    except grpc.RpcError:
        return False
    return True


def open_to_routable(running: RunningAppliance, name: str) -> float:
    from appliance.drivers import ports

    port = running.instance(name)["port"]
    eventually(lambda: ports.answers("127.0.0.1", port), timeout=30, every=0.005)
    began = time.perf_counter()
    eventually(lambda: answers(running, name, tei.EmbedRequest(inputs="x")), timeout=10, every=0.005)
    return time.perf_counter() - began


PARTS = {"engine": bench_engine, "control": bench_control}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder))
