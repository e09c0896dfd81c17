"""Each family of models and each runtime beside sentence-transformers: throughput, the same vectors, and the memory of
a long text.

Six layers of 384 with random weights, two threads, 200 mixed texts on one stream; sentence-transformers with its
defaults (float32, batches of 32) on the same texts, in turns.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil

from appliance.wire.tei.v1 import tei_pb2 as tei
from scripts.bench_pipe import BENCH_PYTHON, ROOT, Reference
from testing.engines import Engine
from testing.texts import mixed_texts

ROUNDS = 3
COUNT = 200
TEXTS = mixed_texts(COUNT)
LONG_TOKENS = 8192
MIB = 2**20


RUNTIMES = {
    "onnxruntime": (),
    "int8": ("--dtype", "int8"),
    "openvino": ("--runtime", "openvino"),
    "openvino bfloat16": ("--runtime", "openvino", "--dtype", "bfloat16"),
}
COLUMNS = ("", "texts/s", *RUNTIMES, "MiB", "MiB more for 8,192 tokens", "seconds for them")


def families(room: Path) -> list[tuple[str, ...]]:
    """A line a family; the first names the columns. Under a runtime: times sentence-transformers, lowest cosine."""
    subprocess.run(
        [BENCH_PYTHON, str(ROOT / "scripts" / "random_families.py"), str(room)], check=True, capture_output=True
    )
    folders = sorted(path for path in room.iterdir() if (path / "config.json").exists())
    return [COLUMNS, *((folder.name, *measured(room, folder)) for folder in folders)]


def measured(room: Path, folder: Path) -> Iterator[str]:
    reference = Reference(str(folder), str(COUNT))
    kept = room / f"{folder.name}.npy"
    reference.job(vectors=str(kept))
    wanted = np.load(kept)
    with ExitStack() as stack:
        engines = {name: Engine(room, folder, "--threads", "2", *flags) for name, flags in RUNTIMES.items()}
        for name, engine in engines.items():
            if "openvino" in name:
                engine.command[0] = BENCH_PYTHON
            stack.enter_context(engine)
        rates: dict[str, list[float]] = {name: [] for name in ("theirs", *engines)}
        cosines: dict[str, float] = {}
        for turn in range(ROUNDS + 1):  # the first warms all of them up
            (took,) = reference.job(batch=32)
            rates["theirs"] += [COUNT / took] if turn else []
            for name, engine in engines.items():
                began = time.perf_counter()
                vectors = stream(engine)
                rates[name] += [COUNT / (time.perf_counter() - began)] if turn else []
                cosines[name] = float((vectors * wanted).sum(axis=1).min())
    reference.process.kill()
    yield f"{statistics.median(rates['onnxruntime']):.0f}"
    for name in RUNTIMES:
        ratio = statistics.median(own / other for own, other in zip(rates[name], rates["theirs"], strict=True))
        yield f"{ratio:.2f}, {cosines[name]:.4f}"
    (folder / "sentence_bert_config.json").unlink()  # it ends texts at 512 tokens
    with Engine(room, folder, "--threads", "2") as engine:
        engine.stub("Embed").Embed(tei.EmbedRequest(inputs="a"))
        process = psutil.Process(engine.process.pid)
        before = process.memory_info().rss
        yield f"{before // MIB}"
        yield from long_text(engine, process, before)


def long_text(engine: Engine, process: psutil.Process, before: int) -> Iterator[str]:
    """The largest memory while one text of 8,192 tokens is computed, and how long that takes."""
    request = tei.EmbedRequest(inputs="a b c d " * LONG_TOKENS, truncate=True)
    began = time.perf_counter()
    call = engine.stub("Embed").Embed.future(request)
    largest = before
    while not call.done():
        largest = max(largest, process.memory_info().rss)
        time.sleep(0.02)
    took = time.perf_counter() - began
    tokens = call.result().metadata.compute_tokens
    if call.code() is not grpc.StatusCode.OK or tokens < LONG_TOKENS - 10:
        yield from ("-", f"- (its limit: {tokens} tokens)")
    else:
        yield f"{(largest - before) // MIB}"
        yield f"{took:.1f}"


def stream(engine: Engine) -> np.ndarray:
    requests = (tei.EmbedRequest(inputs=text, truncate=True) for text in TEXTS)
    return np.array([reply.embeddings for reply in engine.stub("Embed").EmbedStream(requests)], np.float32)
