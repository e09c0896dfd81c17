"""A multiplexer process before TEIs that obey the test, with Envoy before it or without."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from appliance.core.instance import InstanceSpec
from appliance.core.program import MARKER, marker
from appliance.core.state import Instance, State
from appliance.drivers import envoy
from appliance.drivers.statefile import StateFile
from appliance.export.envoy_tables import LATE_SECS
from appliance.node.context import node_id
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.fake_tei import Call, FakeTei, reply_to
from testing.running import eventually, free_ports

SERVICE = "tei_multiplexer.v1.TeiMultiplexer"
TIMEOUT_SECS = 1.0  # grpc_request_timeout_secs of the multiplexer under test
LIMIT_MB = 1  # grpc_max_message_size_mb
ALPHA = mux.Target(instance_name="alpha")


def message(inner: Any = None, target: mux.Target | None = ALPHA) -> bytes:
    """A request of TeiMultiplexer around any bytes; a dict is an order to the fake TEI."""
    request = json.dumps(inner).encode() if isinstance(inner, dict) else inner
    return mux.Envelope(target=target, request=request).SerializeToString()


def instance(name: str, port: int, model_id: str = "org/alpha", wanted: str = "running", launch: int = 1) -> Instance:
    spec = InstanceSpec.parse({"name": name, "model_id": model_id})
    return Instance(spec, (port,), (port + 1000,), created_at="2026-01-01T00:00:00Z", wanted=wanted, launch=launch)


def as_rerank(raw: bytes) -> bytes:
    try:
        envelope = mux.Envelope.FromString(raw)
    except DecodeError:
        return raw
    if envelope.HasField("request"):
        inner = tei.RerankStreamRequest(query="q", text=envelope.request.decode(), return_text=True)
        envelope.request = inner.SerializeToString()
    return envelope.SerializeToString()


class Relay:
    """A multiplexer process with two fake TEIs: alpha and beta run, closed has no listener, halted is stopped.

    express: Envoy is before it, for all instances. timeout_secs: its grpc_request_timeout_secs.
    """

    def __init__(self, folder: Path, express: bool = False, timeout_secs: float = TIMEOUT_SECS) -> None:
        self.express = express
        self.late_secs = LATE_SECS if express else 0  # of Envoy, behind the multiplexer
        self.port, alpha, beta, self.closed_port, halted, *self.more_ports = free_ports(9)
        self.node = node_id(str(folder))
        self.alpha, self.beta = self.fake("alpha", alpha), self.fake("beta", beta)
        self.instances = [
            instance("alpha", alpha),
            instance("beta", beta, "org/beta"),
            instance("closed", self.closed_port, "org/closed"),
            instance("halted", halted, "org/halted", wanted="stopped"),
        ]
        config = folder / "appliance.toml"
        config.write_text(
            f"data_dir = '{folder}'\ngrpc_port = {self.port}\ngrpc_request_timeout_secs = {timeout_secs:.0f}\n"
            f"grpc_max_message_size_mb = {LIMIT_MB}\ngraceful_shutdown_timeout_secs = 5\n"
        )
        self.state = StateFile(folder / "state.toml", now=str, on_repair=print)
        self.write(self.instances)
        self.alpha.start()
        self.beta.start()
        self.environ = {**os.environ, "TEI_MANAGER_CONFIG": str(config)}
        self.programs = ["multiplexer", *(["express"] if express else [])]
        self.folder = folder
        self.processes = [self.run(program, self.environ) for program in self.programs]
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=unlimited)
        grpc.channel_ready_future(self.channel).result(timeout=20)
        for name in ("alpha", "beta"):
            self.wait_routable(mux.Target(instance_name=name))

    def run(self, program: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.output(program).open("wb") as output:
            own = {MARKER: marker(self.node, program, 0, 0)}
            command = [sys.executable, "-m", f"appliance.{program}"]
            process = subprocess.Popen(command, env=environ | own, stdout=output, stderr=output)
        if program == "express":
            eventually(lambda: b"Envoy is process" in self.output(program).read_bytes(), 20)
            eventually(lambda: envoy.ask(self.folder / "express.sock", "GET", "/ready"), 20)
        return process

    def output(self, program: str) -> Path:
        return self.folder / f"{program}.log"

    def fake(self, name: str, port: int, replica: int = 0) -> FakeTei:
        return FakeTei(port, self.node, name, replica)

    def write(self, instances: list[Instance]) -> None:
        own = [replace(each, spec=replace(each.spec, express=self.express)) for each in instances]
        self.state.update(lambda before: State(before.generation, instances={each.name: each for each in own}))

    def wait_routable(self, target: mux.Target, timeout: float = 20) -> None:
        eventually(lambda: self.unary(message(b"", target)) is not None, timeout, every=0.02)

    def unary(self, raw: bytes, method: str = "Embed", timeout: float | None = 10, **options: Any) -> bytes:
        reply: bytes = self.channel.unary_unary(f"/{SERVICE}/{method}")(raw, timeout=timeout, **options)
        return reply

    def stream(self, raws: Any, method: str = "EmbedStream", timeout: float | None = 20, **options: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/{method}")(iter(raws), timeout=timeout, **options)

    def gather(self, raws: Any, timeout: float | None = 10) -> bytes:
        """Each message's inner bytes are the text to rerank; the replies to them come back joined, in order."""
        messages = map(as_rerank, raws)
        reply = self.channel.stream_unary(f"/{SERVICE}/RerankStream")(messages, timeout=timeout)
        ranks = sorted(tei.RerankResponse.FromString(reply).ranks, key=lambda rank: rank.index)
        return b"|".join(reply_to(rank.text.encode()) for rank in ranks)

    def last(self) -> Call:
        return self.alpha.calls[-1]

    def close(self) -> None:
        self.channel.close()
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(timeout=20) for process in self.processes]
        self.alpha.stop()
        self.beta.stop()
        assert not any(statuses), [self.output(program).read_text() for program in self.programs]


def refused(call: Callable[[], Any]) -> Any:
    """The error with which a call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def code_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
