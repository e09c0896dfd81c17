"""A gateway process in front of a multiplexer that answers as a test says: any bytes, none, or never."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import requests

from appliance.core.instance import InstanceSpec
from appliance.core.state import Instance, State
from appliance.drivers.statefile import StateFile
from testing.running import eventually, free_ports

# (requests, call) -> replies, as bytes
Answer = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
LIMIT_MB = 4
UNARY = {"Info", "Embed", "EmbedSparse", "EmbedAll", "Predict", "PredictPair", "Rerank", "Tokenize", "Decode"}


class FakeMultiplexer(grpc.GenericRpcHandler):
    """Listens on a unix socket. ``answers``: by the name of the RPC; the others hang until their call ends."""

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, Answer] = {}
        self.begun, self.ended = threading.Event(), threading.Event()  # of what hangs
        unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
        self.server = grpc.server(ThreadPoolExecutor(64), handlers=[self], options=unlimited)
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method.rpartition("/")[2]
        if name == "Check":
            return grpc.unary_unary_rpc_method_handler(lambda raw, context: b"")
        answer = self.answers.get(name, self.hang)
        if name in UNARY:
            return grpc.unary_unary_rpc_method_handler(lambda raw, context: next(iter(answer(iter([raw]), context))))
        if name == "RerankStream":
            return grpc.stream_unary_rpc_method_handler(lambda raws, context: next(iter(answer(raws, context))))
        return grpc.stream_stream_rpc_method_handler(answer)

    def hang(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        over = threading.Event()
        context.add_callback(over.set)
        self.begun.set()
        over.wait(30)
        self.ended.set()
        yield b""

    def stop(self) -> None:
        self.server.stop(None).wait(10)


class Gateway:
    """`python -m appliance.gateway` on a port of its own, with the instances given."""

    def __init__(self, folder: Path, instances: Sequence[dict[str, Any]], settings: str = "") -> None:
        self.port, *ports = free_ports(1 + len(instances))
        folder.mkdir(exist_ok=True)
        config = folder / f"{self.port}.toml"
        config.write_text(
            f"data_dir = '{folder}'\nhttp_port = {self.port}\nmultiplexer_workers = 1\n"
            f"grpc_max_message_size_mb = {LIMIT_MB}\ngraceful_shutdown_timeout_secs = 1\n{settings}"
        )
        made = [
            Instance(InstanceSpec.parse(fields), (port,), (port + 1000,), created_at="2026-01-01T00:00:00Z")
            for fields, port in zip(instances, ports, strict=True)
        ]
        state = StateFile(folder / "state.toml", now=str, on_repair=print)
        state.update(lambda before: State(before.generation, instances={each.name: each for each in made}))
        self.output = folder / f"{self.port}.log"
        with self.output.open("wb") as output:
            environ = {**os.environ, "TEI_MANAGER_CONFIG": str(config)}
            command = [sys.executable, "-m", "appliance.gateway"]
            self.process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        eventually(lambda: socket.create_connection(("127.0.0.1", self.port)).close() is None, 20)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=20, **options)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10) == 0, self.output.read_text()


class Faked:
    """Both, with one instance `a` unless others are given."""

    def __init__(
        self, folder: Path, instances: Sequence[dict[str, Any]] = ({"name": "a", "model_id": "org/a"},)
    ) -> None:
        self.multiplexer = FakeMultiplexer(folder / "multiplexer-0.sock")
        self.gateway = Gateway(folder, instances)
        self.post = self.gateway.post

    def answer(self, name: str, *replies: bytes) -> None:
        """The RPC answers with these, whatever it is asked."""
        self.multiplexer.answers[name] = lambda requests, call: iter(replies)

    def close(self) -> None:
        self.gateway.close()
        self.multiplexer.stop()
