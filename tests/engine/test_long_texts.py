"""A valid text that takes long is work, and a hang is a hang: probes of a real engine, and of a TEI as it counts."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from appliance.core import busy
from appliance.core.busy import Running
from appliance.core.health import ProbeResult
from appliance.drivers.grpcserver import Server
from appliance.engine import http
from appliance.engine.answers import Answers
from appliance.engine.metrics import EngineMetrics
from appliance.engine.model import LoadedModel
from appliance.engine.service import Service
from appliance.node import probe
from appliance.node.probe import Heard, ProbeTarget
from appliance.wire.tei.v1 import tei_pb2 as tei
from testing.engines import FAMILIES, Engine
from testing.random_models import random_model
from testing.running import eventually, free_ports

TOKENS = 4096


@pytest.mark.processes
def test_an_engine_tells_what_it_computes_while_it_computes_and_a_frozen_one_tells_nothing(tmp_path: Path) -> None:
    model = random_model(tmp_path / "long", width=256, layers=4, positions=TOKENS)
    with Engine(tmp_path, model, "--threads", "1") as engine, ThreadPoolExecutor(1) as callers:
        replica, heard = ProbeTarget(engine.port, engine.metrics_port, proved=lambda port: True), Heard()
        assert probe.probe(replica, 5, heard) == (ProbeResult.ANSWERED, "")
        text = tei.EmbedRequest(inputs="a " * TOKENS, truncate=True)
        call = callers.submit(engine.stub("Embed").Embed, text, timeout=60)
        eventually(lambda: running(replica).tokens == TOKENS, every=0.01)
        began = time.monotonic()
        measurements = [running(replica) for _ in range(10)]
        scrape = (time.monotonic() - began) / 10
        assert probe.probe(replica, 0.2, heard) == (ProbeResult.BUSY, "")
        assert not call.done(), "too fast to tell anything"
        assert measurements[0].tokens == TOKENS
        assert measurements[0].secs < measurements[-1].secs < running(replica).secs
        assert len(call.result().embeddings) == 256
        took = time.monotonic() - began
        assert probe.probe(replica, 5, heard) == (ProbeResult.ANSWERED, "")
        assert running(replica) == Running(0, 0)
        engine.process.send_signal(signal.SIGSTOP)
        try:
            assert probe.probe(replica, 0.2, heard) == (ProbeResult.MISSED, "no answer within 0.2 s")
        finally:
            engine.process.send_signal(signal.SIGCONT)
    print(f"the text took {took:.1f} s; a scrape meanwhile {1000 * scrape:.0f} ms")
    assert scrape < 0.2


def test_a_hang_of_a_short_text_is_told_by_the_engine_itself(tmp_path: Path) -> None:
    """Its runtime never comes back; its metrics do, and say for how long nothing has come out."""
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=1)
    ended = threading.Event()
    model.runtime.run = lambda batch, alone, pooling: ended.wait(60)  # type: ignore[assignment,method-assign]
    server = Server(8, 2**20, shared_port=False)
    for name, handlers in Service(Answers(model, 32), tei.InfoResponse()).handlers().items():
        server.add(name, handlers)
    port, metrics_port = free_ports(2)
    server.start("127.0.0.1", port)
    page = http.serve("127.0.0.1", metrics_port, model.metrics.text)
    assert page is not None
    replica, heard = ProbeTarget(port, metrics_port, proved=lambda port: True), Heard()
    try:
        assert probe.probe(replica, 0.2, heard) == (ProbeResult.BUSY, "")
        eventually(lambda: running(replica).secs > busy.LEAST_SECS, timeout=10)
        outcome, why = probe.probe(replica, 0.2, heard)
        assert outcome is ProbeResult.MISSED
        assert re.fullmatch(r"no answer within 0.2 s; 3 tokens in progress for \d\.\d s, at most 2.0 s expected", why)
    finally:
        ended.set()
        server.stop(0, idle=lambda: True)
        page.shutdown()
        page.server_close()


def running(replica: ProbeTarget) -> Running:
    work = probe.progress(replica)
    assert work is not None
    assert work.running is not None
    return work.running


class CountingTei(grpc.GenericRpcHandler):
    """One batch after the other, one text each, counted as TEI (1.9) counts. While ``hung`` none ends."""

    def __init__(self) -> None:
        self.port, self.metrics_port = free_ports(2)
        self.metrics = EngineMetrics(8192)
        self.computing = threading.Lock()
        self.going = threading.Event()
        self.going.set()
        self.full = False
        self.server = grpc.server(ThreadPoolExecutor(16), handlers=[self])
        self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()
        self.page = http.serve("127.0.0.1", self.metrics_port, self.text)
        self.replica = ProbeTarget(self.port, self.metrics_port, proved=lambda port: True)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.info if call.method.endswith("Info") else self.embed)

    def info(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    def embed(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        if self.full:
            self.metrics.failures.labels("overloaded").inc()
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded")
        tokens = len(tei.EmbedRequest.FromString(raw).inputs.split()) + 2
        self.metrics.counts["embed"].inc()
        with self.computing:
            self.metrics.batch_tokens.observe(tokens)
            self.going.wait(timeout=60)
        self.metrics.input_done("embed", [0, 0, 0, 0.0001 * tokens])
        return tei.EmbedResponse(embeddings=[1.0]).SerializeToString()

    def text(self) -> str:
        own = ("te_batch_running", "te_batch_token")
        return "".join(f"{line}\n" for line in self.metrics.text().splitlines() if not line.startswith(own))

    def stop(self) -> None:
        self.going.set()
        self.server.stop(None).wait(timeout=10)
        if self.page:
            self.page.shutdown()
            self.page.server_close()


class Calls:
    """Texts on their way to one replica."""

    def __init__(self, fake: CountingTei) -> None:
        self.fake = fake
        self.channel = grpc.insecure_channel(f"127.0.0.1:{fake.port}")
        self.call = self.channel.unary_unary("/tei.v1.Embed/Embed")
        self.sent: list[grpc.Future] = []

    def send(self, words: int) -> None:
        """One text, on its way until it is counted."""
        before = probe.progress(self.fake.replica)
        assert before is not None
        self.sent.append(self.call.future(tei.EmbedRequest(inputs="a " * words).SerializeToString(), timeout=60))
        eventually(lambda: self.begun() > before.begun, every=0.01)

    def begun(self) -> float:
        work = probe.progress(self.fake.replica)
        assert work is not None
        return work.begun


@pytest.fixture
def fake() -> Iterator[CountingTei]:
    fake = CountingTei()
    yield fake
    fake.stop()


def calm(fake: CountingTei) -> Heard:
    """After a probe that was answered, and traffic before it."""
    heard = Heard()
    calls = Calls(fake)
    for _ in range(20):
        calls.send(100)
    assert [call.result(timeout=10) for call in calls.sent]
    assert probe.probe(fake.replica, 5, heard)[0] is ProbeResult.ANSWERED
    return heard


def later(heard: Heard, seconds: float) -> None:
    assert heard.silent_since is not None
    heard.silent_since -= seconds


def test_a_tei_with_a_long_text_is_busy_until_it_took_too_long(fake: CountingTei) -> None:
    heard = calm(fake)
    fake.going.clear()
    Calls(fake).send(8000)
    began = time.monotonic()
    for _ in range(3):
        assert probe.probe(fake.replica, 0.1, heard) == (ProbeResult.BUSY, "")
        later(heard, 20)
    later(heard, 20)
    outcome, why = probe.probe(fake.replica, 0.1, heard)
    assert outcome is ProbeResult.MISSED
    told = re.search(r"8192 tokens in progress for (\S+) s, at most 73.7 s expected$", why)
    assert told, why
    # The probes themselves take time, too: on a busy machine more than a second.
    assert 80 <= float(told[1]) <= 80.1 + time.monotonic() - began
    fake.going.set()
    assert probe.probe(fake.replica, 5, heard)[0] is ProbeResult.ANSWERED
    assert heard.silent_since is None


@pytest.mark.parametrize("words", [0, 100])
def test_a_tei_that_hangs_alone_or_on_a_short_text_misses_its_probe(fake: CountingTei, words: int) -> None:
    heard = calm(fake)
    fake.going.clear()
    calls = Calls(fake)
    if words:
        calls.send(words)
        assert probe.probe(fake.replica, 0.1, heard) == (ProbeResult.BUSY, "")
        later(heard, 5)
    for _ in range(3):
        assert probe.probe(fake.replica, 0.1, heard)[0] is ProbeResult.MISSED


def test_a_tei_that_only_refuses_is_busy_as_long_as_what_it_has_may_take(fake: CountingTei) -> None:
    heard = calm(fake)
    fake.going.clear()
    calls = Calls(fake)
    began = time.monotonic()
    calls.send(100)
    fake.full = True
    assert probe.probe(fake.replica, 1, heard)[0] is ProbeResult.BUSY
    assert probe.probe(fake.replica, 1, heard)[0] is ProbeResult.BUSY
    later(heard, 5)
    outcome, why = probe.probe(fake.replica, 1, heard)
    assert outcome is ProbeResult.MISSED
    told = re.match(r"it refuses: Model is overloaded; 128 tokens in progress for (\S+) s, ", why)
    assert told, why
    assert 5 <= float(told[1]) <= 5.1 + time.monotonic() - began
    fake.going.set()
    assert calls.sent[0].result(timeout=10)
    assert probe.probe(fake.replica, 1, heard)[0] is ProbeResult.BUSY
