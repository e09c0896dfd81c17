"""`make bench PARTS=cache`: what the cache of embeddings saves, and what it costs where it saves nothing.

Batches are Arrow calls of ROWS texts of mixed lengths to a MiniLM of the embedded engine. "Off" is the same call with
`x-tei-cache: bypass`. Each round has texts of its own, and the kinds of batch take turns; ratios are medians of those
of a round. Stores are measured in this process, without a network but Redis' socket; CACHE_BENCH_ENTRIES and
CACHE_BENCH_WIDTH say how many entries they have, of how many numbers.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil

from appliance.core.cachekey import CachedEmbedding, keys_for
from appliance.core.cachestore import Store
from appliance.drivers.redisstore import RedisStore
from appliance.drivers.sqlitestore import SqliteStore
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1.tei_pb2_grpc import EmbedStub
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request
from testing.redisserver import RedisServer
from testing.running import RunningAppliance, eventually
from testing.texts import mixed_texts

ROUNDS, ROWS, HIT_REPEATS, SINGLES = 5, 500, 60, 400
SIZES = (("ENTRIES", "100000"), ("WIDTH", "384"))
NAME = "minilm"
BYPASS = (("x-tei-cache", "bypass"),)
PUT_ROWS, GET_ROWS = 1000, 500
Table = list[tuple[str, ...]]


class Took(NamedTuple):
    """Seconds of a call, and of the multiplexer's CPU in it."""

    secs: float
    cpu: float


def batches(running: RunningAppliance) -> Table:
    """Arrow batches: texts a second as ratios to the cache off, and CPU a row of the multiplexer."""
    stub = running.stub()
    processes = [each for each in running.left_over() if "appliance.multiplexer" in each.cmdline()]

    def call(texts: list[str], metadata: Any = ()) -> Took:
        request = dense_request(NAME, list(texts))
        cpu, began = spent(processes), time.perf_counter()
        stub.EmbedArrow(request, timeout=300, metadata=metadata)
        return Took(time.perf_counter() - began, spent(processes) - cpu)

    taken: dict[str, list[Took]] = {"off": [], "misses": [], "half": [], "hits": []}
    for number in range(ROUNDS):
        texts = [f"{text} {number}" for text in mixed_texts(3 * ROWS, seed=number)]
        first, second, third = texts[:ROWS], texts[ROWS : 2 * ROWS], texts[2 * ROWS :]
        taken["off"].append(call(first, BYPASS))
        taken["misses"].append(call(first))
        call(second[::2])
        taken["half"].append(call(second))
        call(third, BYPASS)  # as warm as the others
        cpu = spent(processes)  # of all together: the kernel counts in hundredths of a second
        secs = statistics.median(call(first).secs for _ in range(HIT_REPEATS))
        taken["hits"].append(Took(secs, (spent(processes) - cpu) / HIT_REPEATS))
    lines: Table = [("batch of 500", "texts/s", "to off", "CPU us a row")]
    for kind, each in taken.items():
        rate = statistics.median(ROWS / took.secs for took in each)
        ratio = statistics.median(off.secs / took.secs for off, took in zip(taken["off"], each, strict=True))
        cpu = statistics.median(took.cpu / ROWS * 1e6 for took in each)
        lines.append((kind, f"{rate:,.0f}", f"{ratio:.2f}", f"{cpu:.1f}"))
    return lines


def spent(processes: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def singles(running: RunningAppliance) -> Table:
    """One text, one caller: p50 at the engine's port, through the multiplexer, and from the cache."""
    stub, port = running.stub(), running.instance(NAME)["port"]
    engine = EmbedStub(grpc.insecure_channel(f"127.0.0.1:{port}"))

    def inner(text: str) -> tei.EmbedRequest:
        return tei.EmbedRequest(inputs=text, truncate=True, normalize=True)

    def wrapped(text: str) -> mux.EmbedRequest:
        return mux.EmbedRequest(target=mux.Target(instance_name=NAME), request=inner(text))

    stub.Embed(wrapped("the same"))
    ways: dict[str, Callable[[int], object]] = {
        "the engine's own port": lambda number: engine.Embed(inner(f"direct {number}")),
        "computed": lambda number: stub.Embed(wrapped(f"computed {number}")),
        "a hit": lambda number: stub.Embed(wrapped("the same")),
        # Nothing is looked up, and no replica is asked.
        "an answer without any work": lambda number: stub.EmbedArrow(mux.EmbedArrowRequest(noop=True, arrow_ipc=EMPTY)),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(SINGLES):
        for name, ask in ways.items():
            began = time.perf_counter()
            ask(number)
            took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in took.items()}
    computed = medians["computed"]
    return [
        ("one text, one caller", "p50 ms", "to computed"),
        *((name, f"{each * 1000:.2f}", f"{each / computed:.2f}") for name, each in medians.items()),
    ]


EMPTY = dense_request(NAME, [""]).arrow_ipc


def stores(room: Path) -> Table:
    """sqlite and redis beside each other."""
    count, width = (int(os.environ.get(f"CACHE_BENCH_{name}", default)) for name, default in SIZES)
    lines: Table = [("store", "put us/row", "get us/row", "one p50 us", "one p99 us", "size MB", "our memory MB more")]
    sqlite = SqliteStore(room / "entries", count * 8192 + (1 << 30), print)
    lines.append(("sqlite", *measured(sqlite, count, width)))
    with RedisServer() as server:
        lines.append(("redis", *measured(RedisStore(server.socket_url, deadline_secs=5.0), count, width)))
    return lines


def measured(store: Store, count: int, width: int) -> tuple[str, ...]:
    """As wall time; the memory is that of this process, beyond its keys."""
    key_of = keys_for("f" * 32, "", "Embed", b"")
    vector = np.random.default_rng(1).standard_normal(width, dtype=np.float32).tobytes()
    before, put = psutil.Process().memory_info().rss, 0.0
    for begin in range(0, count, PUT_ROWS):
        keys = [key_of(str(number).encode()) for number in range(begin, min(count, begin + PUT_ROWS))]
        values = {key: CachedEmbedding(key, 1, 1, 1, vector).packed() for key in keys}
        began = time.perf_counter()
        store.put_many("f" * 32, values)
        put += time.perf_counter() - began
    asked = [key_of(str(at).encode()) for at in np.random.default_rng(2).integers(0, count, 40 * GET_ROWS)]
    began = time.perf_counter()
    for begin in range(0, len(asked), GET_ROWS):
        store.get_many("f" * 32, asked[begin : begin + GET_ROWS])
    get = (time.perf_counter() - began) / len(asked)
    single = []
    for key in asked[:5000]:
        began = time.perf_counter()
        assert store.get_many("f" * 32, [key])
        single.append(time.perf_counter() - began)
    single.sort()
    times = (put / count, get, single[len(single) // 2], single[len(single) * 99 // 100])
    more = (psutil.Process().memory_info().rss - before) / 1e6
    return (*(f"{each * 1e6:.1f}" for each in times), f"{(store.stats().size or 0) / 1e6:,.0f}", f"{more:,.0f}")


def cache(room: Path) -> Iterator[tuple[str, Table]]:
    """The tables behind their titles."""
    settings = "multiplexer_workers = 1"
    with RunningAppliance(Path(tempfile.mkdtemp(dir=room)), settings=settings, cache=True) as running:
        running.wait_ready(NAME)
        eventually(lambda: running.instance(NAME)["fingerprint"])
        yield "Arrow batches of 500 texts, MiniLM", batches(running)
        yield "single texts", singles(running)
    yield "stores", stores(room)
