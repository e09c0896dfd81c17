"""The engine on a GPU (`--runtime torch`) beside sentence-transformers on the same GPU: texts a second, the time of one
short text, and the same vectors.

Random weights in the sizes of models that people use, mixed texts; sentence-transformers at several batch sizes, the
engine makes its batches itself, of one stream and of four, which one process reads. In turns, medians.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from appliance.wire.tei.v1 import tei_pb2 as tei
from scripts.bench_pipe import BENCH_PYTHON, ROOT, Reference
from testing.engines import Engine
from testing.texts import mixed_texts

MODELS = ("bert:6x384", "bert:12x768", "bert:24x1024", "qwen3:28x1024")
DTYPES = ("float32", "bfloat16")
BATCHES = (32, 128, 512)
STREAMS = (1, 4)
ROUNDS, COUNT, SINGLES = 3, 4000, 100
DEVICE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
COLUMNS = (
    *("", *(f"theirs, {size}" for size in BATCHES), *(f"{count} streams" for count in STREAMS), "times their best"),
    *("lowest cosine", "one text: theirs, ms", "ours"),
)


def device() -> str:
    return subprocess.run([BENCH_PYTHON, "-c", DEVICE], check=True, capture_output=True, text=True).stdout.strip()


def gpu(room: Path, models: tuple[str, ...] = MODELS) -> Iterator[tuple[str, ...]]:
    """A line for each model and dtype; the first names the columns. Texts a second, where nothing else is said."""
    if (name := device()) == "cpu":
        yield ("there is no GPU here",)
        return
    subprocess.run(
        [BENCH_PYTHON, str(ROOT / "scripts" / "random_families.py"), str(room), *models],
        check=True,
        capture_output=True,
    )
    yield (f"on {name}", *COLUMNS[1:])
    for model in models:
        for dtype in DTYPES:
            yield (f"{model} {dtype}", *measured(room, room / model.replace(":", "-"), dtype))


def measured(room: Path, folder: Path, dtype: str) -> Iterator[str]:
    texts = mixed_texts(COUNT)
    with ExitStack() as stack:
        reference = Reference(str(folder), str(COUNT), "cuda", dtype)
        stack.callback(reference.process.kill)
        engine = Engine(room, folder, "--runtime", "torch", "--dtype", dtype)
        engine.command[0] = BENCH_PYTHON
        stack.enter_context(engine)
        reference.job(vectors=str(room / "vectors.npy"))
        theirs = np.load(room / "vectors.npy")
        ours = unit(streamed(engine, texts, 1))
        rates: dict[str, list[float]] = {}
        singles: dict[str, list[float]] = {"theirs": [], "ours": []}
        for turn in range(ROUNDS + 1):  # the first warms both up
            for size in BATCHES:
                (took,) = reference.job(batch=size)
                rates.setdefault(f"theirs {size}", []).append(COUNT / took)
            for count in STREAMS:
                began = time.perf_counter()
                streamed(engine, texts, count)
                rates.setdefault(f"ours {count}", []).append(COUNT / (time.perf_counter() - began))
            singles["theirs"] += reference.job(batch=1, short=SINGLES)
            singles["ours"] += single(engine)
            if not turn:
                rates.clear()
        middle = {name: statistics.median(each) for name, each in rates.items()}
        best = {side: max(rate for name, rate in middle.items() if side in name) for side in ("theirs", "ours")}
        yield from (f"{rate:.0f}" for rate in middle.values())
        yield f"{best['ours'] / best['theirs']:.2f}"
        yield f"{(ours * unit(theirs)).sum(axis=1).min():.5f}"
        yield from (f"{statistics.median(each) * 1000:.2f}" for each in singles.values())


def unit(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    unit_: np.ndarray = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return unit_


def streamed(engine: Engine, texts: list[str], streams: int) -> np.ndarray:
    """[texts, width]: of so many streams, each with its part of the texts."""

    def one(part: list[str]) -> list[np.ndarray]:
        requests = (tei.EmbedRequest(inputs=text, truncate=True) for text in part)
        return [np.asarray(reply.embeddings, np.float32) for reply in engine.stub("Embed").EmbedStream(requests)]

    with ThreadPoolExecutor(streams) as threads:
        size = -(-len(texts) // streams)
        parts = list(threads.map(one, (texts[at : at + size] for at in range(0, len(texts), size))))
    return np.array([vector for part in parts for vector in part])


def single(engine: Engine) -> list[float]:
    took = []
    for _ in range(SINGLES):
        began = time.perf_counter()
        engine.stub("Embed").Embed(tei.EmbedRequest(inputs="a short query", truncate=True))
        took.append(time.perf_counter() - began)
    return took
