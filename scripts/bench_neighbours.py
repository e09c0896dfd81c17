"""`make bench PARTS=neighbours`: an embedded engine beside others, with the cores shared batch by batch, and divided.

Everything is a ratio to an instance that is alone in an appliance beside, which has its turn in each round: texts a
second of Arrow batches of mixed lengths, and the p50 of a lone caller's short text. MiniLM, medians of five rounds.
"""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request
from testing.running import MINILM, RunningAppliance
from testing.texts import mixed_texts

NAMES = ("a", "b", "c", "d")
TEXTS = mixed_texts(80)
LONE_CALLS = 60
ROUNDS = 5


def neighbours(room: Path) -> list[tuple[str, ...]]:
    """The rows of the table."""
    table: list[tuple[str, ...]] = [
        ("cores", "beside 3 idle", "2 busy together", "4 busy together", "lone caller's p50 beside a bulk job")
    ]
    for kind in ("divided", "shared"):
        with (
            started(room / f"{kind}-alone", kind, 1) as alone,
            started(room / f"{kind}-all", kind, len(NAMES)) as crowd,
        ):
            rounds = [one_round(alone, crowd) for _ in range(ROUNDS)]
        table.append((kind, *(f"{statistics.median(ratios):.2f}" for ratios in zip(*rounds, strict=True))))
    return table


@contextmanager
def started(folder: Path, kind: str, instances: int) -> Iterator[RunningAppliance]:
    """An appliance whose instances have all had work."""
    folder.mkdir()
    with RunningAppliance(folder, seeds="", settings=f'engine_cores = "{kind}"') as running:
        for name in NAMES[:instances]:
            running.create(name, model_id=MINILM, engine="embedded")
        for name in NAMES[:instances]:  # where the cores are divided, an engine counts the others when it starts
            running.post(f"/instances/{name}/restart")
            running.wait_ready(name)
            batch(running, name)
        yield running


def one_round(alone: RunningAppliance, crowd: RunningAppliance) -> list[float]:
    """The ratios of the table."""
    texts, p50 = together(alone, 1), lone(alone)
    ratios = [together(crowd, count) / texts for count in (1, 2, 4)]
    with ThreadPoolExecutor(1) as bulk:
        stop: list[bool] = []
        job = bulk.submit(lambda: [batch(crowd, "b") for _ in iter(lambda: not stop, False)])
        time.sleep(0.5)
        ratios.append(lone(crowd) / p50)
        stop.append(True)
        job.result()
    return ratios


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
