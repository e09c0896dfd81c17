"""`make bench PARTS=images`: images a second of the embedded engine, beside transformers on the same JPEGs.

A CLIP of the usual size (ViT-B/32) with random weights, 96 photos of 640 pixels' width, decoding and resizing included;
transformers takes batches of 32. The two take turns, medians of ROUNDS.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from appliance.wire.tei_appliance.v1.engine_pb2_grpc import ImagesStub
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from scripts.bench_pipe import Reference
from testing.engines import Engine

ROUNDS = 5
MIB = 2**20


def images(room: Path) -> list[tuple[str, ...]]:
    reference = Reference(str(room), script="bench_image_reference.py")
    try:
        return table(room, reference)
    finally:
        reference.process.kill()


def table(room: Path, reference: Reference) -> list[tuple[str, ...]]:
    kept = room / "vectors.npy"
    reference.job(vectors=str(kept))
    wanted = np.load(kept)
    raw = [file.read_bytes() for file in sorted((room / "samples").iterdir())]
    theirs, alone, stream, small = [], [], [], []
    flags = ("--threads", "2")
    with Engine(room, room, *flags) as engine, Engine(room, room, *flags, "--dtype", "int8") as other:
        stub = ImagesStub(engine.channel)
        for turn in range(ROUNDS + 1):  # the first warms both up
            (took,) = reference.job()
            _, whole_numbers = streamed(ImagesStub(other.channel), raw)
            found, floats = streamed(stub, raw)
            between = time.perf_counter()
            for image in raw[:20]:
                stub.EmbedImage(EmbedImageRequest(image=image))
            if turn:
                theirs.append(len(raw) / took)
                stream.append(floats)
                small.append(whole_numbers)
                alone.append(20 / (time.perf_counter() - between))
        memory = psutil.Process(engine.process.pid).memory_info().rss // MIB
    ratio = statistics.median(ours / other for ours, other in zip(stream, theirs, strict=True))
    cosine = float((found * wanted).sum(axis=1).min())
    rates = (f"{statistics.median(rates):.1f}" for rates in (theirs, stream, alone, small))
    return [
        (
            "transformers",
            "a stream",
            "one after the other",
            "a stream, int8",
            "a stream's ratio",
            "lowest cosine",
            "MiB",
        ),
        (*rates, f"{ratio:.2f}", f"{cosine:.4f}", str(memory)),
    ]


def streamed(stub: Any, raw: list[bytes]) -> tuple[np.ndarray, float]:
    """The vectors of the images, and how many a second were answered."""
    began = time.perf_counter()
    requests = (EmbedImageRequest(image=image) for image in raw)
    found = np.array([reply.embeddings for reply in stub.EmbedImageStream(requests)], np.float32)
    return found, len(raw) / (time.perf_counter() - began)
