"""Every RPC books what it keeps for its caller: while the budget is used up, large calls are refused and told when to
try again, small ones go through, and afterwards all of it is free."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import lz4.frame
import psutil
import pyarrow as pa
import pytest

from appliance.core.state import State
from appliance.drivers.statefile import StateFile
from appliance.node.context import node_id
from appliance.wire.methods import METHODS, Shape
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import ipc
from testing.fake_tei import FakeTei
from testing.half_sender import HalfSender
from testing.relay import SERVICE, as_rerank, code_of, instance, message, refused
from testing.running import eventually, free_ports

pytestmark = pytest.mark.processes

MIB = 2**20
BUDGET_MB = 32
ARROW = {
    "EmbedArrow": mux.EmbedArrowRequest,
    "EmbedSparseArrow": mux.EmbedSparseArrowRequest,
    "EmbedAllArrow": mux.EmbedAllArrowRequest,
    "EmbedArrowStream": mux.EmbedArrowRequest,
    "EmbedSparseArrowStream": mux.EmbedSparseArrowRequest,
    "EmbedAllArrowStream": mux.EmbedAllArrowRequest,
}
EVERY_RPC = [method.name for method in METHODS] + list(ARROW)


class Small:
    """A multiplexer process with a budget of 32 MiB, in front of a TEI that obeys."""

    def __init__(self, folder: Path) -> None:
        self.port, alpha = free_ports(2)
        self.alpha = FakeTei(alpha, node_id(str(folder)), "alpha")
        self.alpha.start()
        config = folder / "appliance.toml"
        config.write_text(f"data_dir = '{folder}'\ngrpc_port = {self.port}\nmemory_budget_mb = {BUDGET_MB}\n")
        state = StateFile(folder / "state.toml", now=str, on_repair=print)
        state.update(lambda before: State(before.generation, instances={"alpha": instance("alpha", alpha)}))
        environ = {**os.environ, "TEI_MANAGER_CONFIG": str(config)}
        self.output = folder / "multiplexer.log"
        with self.output.open("wb") as output:
            command = [sys.executable, "-m", "appliance.multiplexer"]
            self.process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", unlimited)
        grpc.channel_ready_future(self.channel).result(timeout=20)
        eventually(lambda: self.call("Embed", message(b"x")), every=0.05)

    def call(self, name: str, raw: bytes, timeout: float = 20) -> Any:
        """The first reply."""
        path = f"/{SERVICE}/{name}"
        if name == "RerankStream":
            return self.channel.stream_unary(path)(iter([as_rerank(raw)]), timeout=timeout)
        if name.endswith("Stream"):
            return next(self.channel.stream_stream(path)(iter([raw]), timeout=timeout))
        return self.channel.unary_unary(path)(raw, timeout=timeout)

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def close(self) -> None:
        self.channel.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=20)
        self.alpha.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    running = Small(tmp_path_factory.mktemp("small"))
    yield running
    running.close()


def large(name: str) -> bytes:
    """A request for which the budget has no room while 28 MiB are in use."""
    if name in ARROW:  # some KB that expand to a MB
        raw = ipc(pa.table({"text": ["x" * 10_000] * 100}), "frame")
        return bytes(
            ARROW[name](target=mux.Target(instance_name="alpha"), arrow_ipc=raw, noop=True).SerializeToString()
        )
    return of_text(name, b"x" * 5 * MIB)


def of_text(name: str, text: bytes) -> bytes:
    return message(
        tei.RerankRequest(query="q", texts=[text.decode()]).SerializeToString() if name == "Rerank" else text
    )


def try_all(small: Small, request: Callable[[str], bytes]) -> dict[str, grpc.RpcError | None]:
    def one(name: str) -> grpc.RpcError | None:
        try:
            small.call(name, request(name))
        except grpc.RpcError as error:
            return error
        return None

    with ThreadPoolExecutor(len(EVERY_RPC)) as pool:
        return dict(zip(EVERY_RPC, pool.map(one, EVERY_RPC), strict=True))


def test_while_the_budget_is_used_up_every_large_call_is_refused_and_every_small_one_answered(small: Small) -> None:
    hangs = json.dumps({"hang": True, "filled": "x" * 28 * MIB}).encode()
    before = len(small.alpha.calls)
    holder = small.channel.stream_stream(f"/{SERVICE}/EmbedStream")(iter([message(hangs)]))
    eventually(lambda: len(small.alpha.calls) > before and small.alpha.calls[-1].requests)
    try:
        found = try_all(small, large)
        codes = {name: error.code().name if error else "OK" for name, error in found.items()}
        assert codes == dict.fromkeys(EVERY_RPC, "RESOURCE_EXHAUSTED")
        for name, error in found.items():
            assert error
            assert "memory_budget_mb" in error.details(), (name, error.details())
            trailing = dict(error.trailing_metadata())
            assert trailing["retry-after-ms"] == "1000"
            assert trailing["x-tei-code"] == "OUT_OF_MEMORY"
        shapes = {method.name: method.shape for method in METHODS}
        little = try_all(small, lambda name: large(name) if name in ARROW else of_text(name, b"little"))
        assert [name for name in shapes if little[name]] == []
    finally:
        holder.cancel()

    # One after the other they fit; at once the budget has room for some of them.
    for name in EVERY_RPC:
        eventually(lambda name=name: small.call(name, large(name)) is not None, timeout=10)


def test_noop_of_arrow_that_expands_is_bounded_as_a_whole(small: Small) -> None:
    """Eight messages of 1.3 MB took 8.8 GB. One is let in when the others have next to nothing."""
    raw = lz4.frame.compress(ipc(pa.table({"text": ["x" * 10_000] * 10_000})))
    request = mux.EmbedArrowRequest(arrow_ipc=raw, noop=True).SerializeToString()
    before = small.rss()
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: code_of(lambda: small.call("EmbedArrow", request)), range(4)))
    assert "OK" in codes
    assert small.rss() - before < 400 * MIB


def test_texts_to_rerank_are_not_gathered_without_end(small: Small) -> None:
    """One stream took 2.4 GB, and would have taken more."""
    before = small.rss()
    inner = as_rerank(message(b"x" * MIB))
    call = small.channel.stream_unary(f"/{SERVICE}/RerankStream")
    error = refused(lambda: call((inner for _ in range(1000)), timeout=60))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "memory_budget_mb" in error.details()
    assert small.rss() - before < 200 * MIB


def test_half_sent_requests_are_kept_only_as_far_as_the_budget_goes(small: Small) -> None:
    """A message of up to 40 MiB may be on its way: with a budget of 32 one may take its time, the others are ended."""
    halves = [HalfSender(small.port, f"/{SERVICE}/Embed", bytes(8 * MIB), keep_back=1) for _ in range(6)]

    def all_but_one_ended() -> bool:
        for each in halves:
            each.go_on()
        return sum(each.ended for each in halves) == len(halves) - 1

    eventually(all_but_one_ended, timeout=10)
    codes = {each.trailers["grpc-status"] for each in halves if each.ended}
    assert codes == {str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])}
    told = {(each.trailers["retry-after-ms"], each.trailers["x-tei-code"]) for each in halves if each.ended}
    assert told == {("1000", "OUT_OF_MEMORY")}
    for each in halves:
        each.close()


def test_every_shape_is_among_the_rpcs() -> None:
    assert {method.shape for method in METHODS} == set(Shape)
