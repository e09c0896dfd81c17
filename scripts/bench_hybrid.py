"""Hybrid beside the calls that it stands for: milliseconds of a call, one after the other, over the multiplexer.

Three small instances (dense, SPLADE, ColBERT; two layers of 32 with random weights, so that little but the way is
measured), one that has all three heads, and three replicas that wait for 10 ms, as one waits for a GPU: the others take
each other's cores. The cache is bypassed. `over the slowest`: what Hybrid takes more than the slowest of its legs,
called alone in the same round.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from appliance.core.program import MARKER, marker
from appliance.core.state import State
from appliance.drivers.statefile import StateFile
from appliance.node.context import node_id
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.engines import FAMILIES, HEADS
from testing.relay import instance
from testing.running import RunningAppliance, eventually, free_ports

ROUNDS, CALLS = 5, 300
MODELS = {
    "dense": {"model_id": str(FAMILIES / "bert-cls")},
    "splade": {"model_id": str(FAMILIES / "bert-splade"), "pooling": "splade"},
    "colbert": {"model_id": str(HEADS / "colbert")},
    "m3": {"model_id": str(HEADS / "bge-m3")},
}
TEXT = "rain over the harbour, and the bridge stayed closed"
BYPASS = (("x-tei-cache", "bypass"),)
KINDS = (
    ("dense", mux.HYBRID_OUTPUT_DENSE),
    ("splade", mux.HYBRID_OUTPUT_SPARSE),
    ("colbert", mux.HYBRID_OUTPUT_TOKENS),
)
COLUMNS = ("", "dense", "sparse", "tokens", "all three in turn", "Hybrid", "over the slowest", "passes")
WAIT_SECS = 0.01
STUB = Path(__file__).with_name("bench_waiting.py")


def hybrid(room: Path) -> list[tuple[str, ...]]:
    """A line for three instances, for one model with three heads, for three that wait; the first names the columns."""
    with RunningAppliance(room, seeds="") as running:
        for name, fields in MODELS.items():
            running.create(name, **fields)
        for name in MODELS:
            running.wait_ready(name)
        stub, names = running.stub(), [name for name, _ in KINDS]
        lines = [COLUMNS, row(stub, "three instances", names), row(stub, "one, as BGE-M3", ["m3"] * 3)]
    with waiting(room / "waiting") as stub:
        return [*lines, row(stub, "three that wait", names)]


@contextmanager
def waiting(folder: Path) -> Iterator[Any]:
    """The stub of a multiplexer before three replicas that wait."""
    folder.mkdir()
    port, *ports = free_ports(1 + len(KINDS))
    (folder / "appliance.toml").write_text(f"data_dir = '{folder}'\ngrpc_port = {port}\n")
    instances = {name: instance(name, each, f"org/{name}") for each, (name, _) in zip(ports, KINDS, strict=True)}
    StateFile(folder / "state.toml", now=str, on_repair=print).update(
        lambda before: State(before.generation, instances=instances)
    )
    environ = {**os.environ, "TEI_MANAGER_CONFIG": str(folder / "appliance.toml")}
    commands = [[sys.executable, "-m", "appliance.multiplexer"]]
    marks = [""]
    for each in instances.values():
        commands.append([sys.executable, str(STUB), str(each.ports[0]), str(WAIT_SECS), each.spec.name])
        marks.append(marker(node_id(str(folder)), each.spec.name, 0, each.launch))
    processes = [
        subprocess.Popen(command, env=environ | {MARKER: mark}, stderr=subprocess.DEVNULL)
        for command, mark in zip(commands, marks, strict=True)
    ]
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            yield TeiMultiplexerStub(channel)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def row(stub: Any, title: str, names: list[str]) -> tuple[str, ...]:
    singles = [single(stub, name, output) for name, (_, output) in zip(names, KINDS, strict=True)]
    legs = [
        mux.HybridLeg(target=mux.Target(instance_name=name), output=output)
        for name, (_, output) in zip(names, KINDS, strict=True)
    ]
    request = mux.HybridRequest(inputs=TEXT, truncate=True, legs=legs)
    passes = eventually(lambda: stub.Hybrid(request, metadata=BYPASS).passes)
    works: list[Callable[[], Any]] = [*singles, lambda: stub.Hybrid(request, metadata=BYPASS)]
    rounds = [[milliseconds(work) for work in works] for _ in range(ROUNDS)]
    over = statistics.median(each[-1] - max(each[:-1]) for each in rounds)
    middle = [statistics.median(each) for each in zip(*rounds, strict=True)]
    in_turn = statistics.median(sum(each[:-1]) for each in rounds)
    numbers = [*middle[:-1], in_turn, middle[-1], over]
    return (title, *(f"{number:.2f} ms" for number in numbers), str(passes))


def single(stub: Any, name: str, output: int) -> Callable[[], Any]:
    target = mux.Target(instance_name=name)
    if output == mux.HYBRID_OUTPUT_DENSE:
        dense = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs=TEXT, truncate=True, normalize=True))
        return lambda: stub.Embed(dense, metadata=BYPASS)
    if output == mux.HYBRID_OUTPUT_SPARSE:
        sparse = mux.EmbedSparseRequest(target=target, request=tei.EmbedSparseRequest(inputs=TEXT, truncate=True))
        return lambda: stub.EmbedSparse(sparse, metadata=BYPASS)
    tokens = mux.EmbedAllRequest(target=target, request=tei.EmbedAllRequest(inputs=TEXT, truncate=True))
    return lambda: stub.EmbedAll(tokens, metadata=BYPASS)


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of CALLS calls, one after the other."""
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        work()
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)
