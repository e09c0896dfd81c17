"""`make bench PARTS=neighbours`: an embedded engine beside others, with the cores shared batch by batch, and divided.

Everything is a ratio to the same instance alone in the same appliance: texts a second of Arrow batches of mixed
lengths, and the p50 of a lone caller's short text. MiniLM, medians of three rounds.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request
from testing.running import MINILM, RunningAppliance
from testing.texts import mixed_texts

NAMES = ("a", "b", "c", "d")
TEXTS = mixed_texts(80)
LONE_CALLS = 60
ROUNDS = 3


class Alone(NamedTuple):
    """texts: a second; p50: seconds."""

    texts: float
    p50: float


def neighbours(room: Path) -> list[tuple[str, ...]]:
    """The rows of the table."""
    table: list[tuple[str, ...]] = [
        ("cores", "beside 3 idle", "2 busy together", "4 busy together", "lone caller's p50 beside a bulk job")
    ]
    for kind in ("divided", "shared"):
        (room / kind).mkdir()
        with RunningAppliance(room / kind, seeds="", settings=f'engine_cores = "{kind}"') as running:
            table.append((kind, *measured(running)))
    return table


def measured(running: RunningAppliance) -> list[str]:
    running.create("a", model_id=MINILM, engine="embedded")
    running.wait_ready("a")
    batch(running, "a")
    alone = Alone(median(lambda: together(running, 1)), median(lambda: lone(running)))
    for name in NAMES[1:]:
        running.create(name, model_id=MINILM, engine="embedded")
    for name in NAMES:  # where the cores are divided, an engine counts the others when it starts
        running.post(f"/instances/{name}/restart")
        running.wait_ready(name)
        batch(running, name)
    ratios = [median(lambda count=count: together(running, count)) / alone.texts for count in (1, 2, 4)]
    with ThreadPoolExecutor(1) as bulk:
        stop: list[bool] = []
        job = bulk.submit(lambda: [batch(running, "b") for _ in iter(lambda: not stop, False)])
        time.sleep(0.5)
        beside = median(lambda: lone(running)) / alone.p50
        stop.append(True)
        job.result()
    return [f"{ratio:.2f}" for ratio in (*ratios, beside)]


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


def together(running: RunningAppliance, count: int) -> float:
    """Texts a second of so many instances, each with two batches."""
    began = time.perf_counter()
    with ThreadPoolExecutor(2 * count) as callers:
        list(callers.map(lambda name: batch(running, name), NAMES[:count] * 2))
    return 2 * count * len(TEXTS) / (time.perf_counter() - began)


def batch(running: RunningAppliance, name: str) -> None:
    running.stub().EmbedArrow(dense_request(name, TEXTS), timeout=300)


def lone(running: RunningAppliance) -> float:
    request = mux.EmbedRequest(target=mux.Target(instance_name="a"), request=tei.EmbedRequest(inputs="hello world"))
    stub, took = running.stub(), []
    for _ in range(LONE_CALLS):
        began = time.perf_counter()
        stub.Embed(request, timeout=60)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
