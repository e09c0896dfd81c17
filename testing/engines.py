"""Engines for tests: a real `python -m appliance.engine` process on free ports."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from appliance.drivers import ports
from appliance.drivers.grpcserver import Server
from appliance.engine.answers import Answers
from appliance.engine.model import LoadedModel
from appliance.engine.service import Service
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei.v1 import tei_pb2_grpc as stubs
from appliance.wire.tei_appliance.v1.engine_pb2_grpc import ImagesStub
from testing.running import eventually, free_ports

FAMILIES = Path(__file__).parents[1] / "tests" / "data" / "families"
IMAGES = Path(__file__).parents[1] / "tests" / "data" / "images"
HEADS = Path(__file__).parents[1] / "tests" / "data" / "heads"


class ServedModel:
    """A model served in this process, over gRPC as an engine serves it."""

    def __init__(self, model: Path, graphs: Path, pooling: str | None = None) -> None:
        self.model = LoadedModel(model, graphs, threads=1, pooling=pooling)
        self.server = Server(8, 2**26, shared_port=False)
        for name, handlers in Service(Answers(self.model, 32), tei.InfoResponse()).handlers().items():
            self.server.add(name, handlers)
        (port,) = free_ports(1)
        self.server.start("127.0.0.1", port)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def stub(self, name: str) -> Any:
        return getattr(stubs, f"{name}Stub")(self.channel)

    def images(self) -> Any:
        return ImagesStub(self.channel)

    def stop(self) -> None:
        self.channel.close()
        self.server.stop(0, idle=lambda: True)


class Engine:
    """One engine process for ``model`` (a folder or an id), on ``port`` where that is given; a context manager."""

    def __init__(
        self,
        room: Path,
        model: str | Path,
        *flags: str,
        environ: dict[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        free, self.metrics_port = free_ports(2)
        self.port = port or free
        self.log = room / f"engine-{self.port}.log"
        endpoint = ("--hostname", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(self.metrics_port))
        self.command = [sys.executable, "-m", "appliance.engine", "--model-id", str(model), *endpoint, *flags]
        self.environ = {**os.environ, "TEI_MANAGER_DATA_DIR": str(room), **(environ or {})}

    def __enter__(self) -> "Engine":
        self.start()
        eventually(self.answers, 30)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        return self

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environ, stdout=log, stderr=log)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        # Both: whoever looks for free ports meanwhile would take the other one.
        return all(ports.answers("127.0.0.1", port) for port in (self.port, self.metrics_port))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.channel.close()
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=20)

    def stub(self, service: str) -> Any:
        return getattr(stubs, f"{service}Stub")(self.channel)


def files_of(family: str) -> dict[str, bytes]:
    """The files of one of FAMILIES as a hub has them: by their names in the folder, without what tests compare with."""
    folder = FAMILIES / family
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "expected.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.stat().st_size}
