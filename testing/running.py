"""A whole appliance in a temporary folder: `appliance up` as a user starts it, on free ports."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
import requests

from appliance.core.program import MARKER
from appliance.drivers import processes
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
# It loads with two thirds of the CPU that MiniLM takes. Its vectors have 32 numbers.
TINY, TINY_WIDTH = str(Path(__file__).parents[1] / "tests" / "data" / "families" / "bert-cls"), 32
SEED = f'[[instances]]\nname = "minilm"\nmodel_id = "{MINILM}"\n'
NO_CACHE = "[cache]\nenabled = false\n"
UP_SECS = 60.0
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.02, 0.1  # of `eventually`
PORTS = range(12000, 32000)  # each worker has its part of them: a quarter for single ports, else for appliances
INSTANCE_PORTS = 100  # of each appliance
BLOCK = 2 * INSTANCE_PORTS + 50  # with their metrics, and its own three


class PortRange:
    """Ports in turn: who was given one may listen there only later, so nobody else is given it for a long time."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.size = begin, end - begin
        self.next = os.getpid() % self.size  # test processes beside us keep out of our way

    def take(self, count: int) -> list[int]:
        """Ports beside each other, as far as they were free a moment ago."""
        found: list[int] = []
        while len(found) < count:
            port = self.begin + self.next % self.size
            self.next += 1
            if is_free(port):
                found.append(port)
        return found

    def block(self, count: int) -> int:
        """The first of so many ports beside each other, all free."""
        while True:
            if self.next % self.size + count > self.size:
                self.next += -self.next % self.size
            first = self.begin + self.next % self.size
            self.next += count
            if all(map(is_free, range(first, first + count))):
                return first


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def worker_ports() -> tuple[PortRange, PortRange]:
    """Of this test process: for single ports, and for appliances."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    span = len(PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    begin = PORTS[span * worker]
    return PortRange(begin, begin + span // 4), PortRange(begin + span // 4, begin + span)


SINGLE, BLOCKS = worker_ports()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, below the range from which the kernel takes its own."""
    return SINGLE.take(count)


def eventually(check: Callable[[], Any], timeout: float = 40.0, every: float | None = None) -> Any:
    """The first true result of ``check``; fails with the last result, or its exception, after ``timeout`` seconds.

    every: seconds between two looks; left out, they grow: what takes long is not looked at so often that the looks take
    the cores from it (REST, its XML-RPC and the test's own side take some 3.2 ms of CPU together).
    """
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_SECS
    while True:
        problem = None
        try:
            if result := check():
                return result
        except (AssertionError, OSError, requests.RequestException, grpc.RpcError) as error:
            problem = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {check.__name__}") from problem
        time.sleep(pause if every is None else every)
        pause = min(LONGEST_PAUSE_SECS, pause * 1.5)


class RunningAppliance:
    """`appliance up` in ``folder``. Use as a context manager; afterwards nothing of it may be left running.

    cache: of embeddings, as it is by default. Without it every call reaches a replica, also one for a text that was
    asked before: that is what most tests are about.
    """

    def __init__(
        self,
        folder: Path,
        seeds: str = SEED,
        settings: str = "",
        environ: dict[str, str] | None = None,
        cache: bool = False,
    ):
        self.folder = folder / "data"
        self.config = folder / "appliance.toml"
        block = PortRange(first := BLOCKS.block(BLOCK), first + BLOCK)
        block.next = 0
        self.api_port, self.grpc_port, self.http_port = block.take(3)
        begin = self.http_port + 1
        self.instance_ports = (begin, begin + INSTANCE_PORTS)
        self.config.write_text(
            f"api_port = {self.api_port}\ngrpc_port = {self.grpc_port}\nhttp_port = {self.http_port}\n"
            f"instance_port_start = {begin}\ninstance_port_end = {begin + INSTANCE_PORTS}\n"
            f"prometheus_port_start = {begin + INSTANCE_PORTS}\ngraceful_shutdown_timeout_secs = 5\n{settings}\n"
            f"{'' if cache else NO_CACHE}{seeds}"
        )
        self.environ = {**os.environ, "TEI_MANAGER_DATA_DIR": str(self.folder), **(environ or {})}
        self.host = "127.0.0.1"
        self.url = f"http://{self.host}:{self.api_port}"
        self.output = folder / "up.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RunningAppliance":
        try:
            self.up()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        left = self.left_over()
        for process in left:
            process.kill()
        assert not left or error, f"left running: {left}"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "appliance", "--config", str(self.config), *arguments]

    def up(self) -> None:
        """Start, and wait until REST and gRPC answer."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(self.command("up"), env=self.environ, stdout=output, stderr=output)
        eventually(lambda: self.get("/ready").status_code == 200, UP_SECS)
        for port in (self.grpc_port, self.http_port):
            eventually(lambda port=port: socket.create_connection((self.host, port)).close() is None, UP_SECS)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C, and wait for the end; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=40)

    def cli(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=timeout)

    def supervisorctl(self, *arguments: str) -> str:
        conf = str(self.folder / "supervisord.conf")
        command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", conf, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    def get(self, path: str, **query: Any) -> requests.Response:
        return requests.get(self.url + path, params=query, timeout=60)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=60, **options)

    def delete(self, path: str) -> requests.Response:
        return requests.delete(self.url + path, timeout=60)

    def create(self, name: str, **fields: Any) -> dict[str, Any]:
        """An instance of the tiny model, unless ``fields`` name another one."""
        response = self.post("/instances", {"name": name, "model_id": TINY, **fields})
        assert response.status_code == 201, response.text
        created: dict[str, Any] = response.json()
        return created

    def instance(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/instances/{name}").json()
        return found

    def wait_ready(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        """Until every replica of the instance answers."""

        def ready() -> dict[str, Any] | None:
            found = self.instance(name)
            return found if found.get("replicas_ready") == found.get("replicas") else None

        found = dict(eventually(ready, timeout))
        target = mux.Target(instance_name=name)
        # A listening port is routable within a second; the reply of an engine is what proves it.
        eventually(lambda: self.stub().Info(mux.InfoRequest(target=target), timeout=5), timeout=40)
        return found

    def stub(self) -> Any:
        return TeiMultiplexerStub(grpc.insecure_channel(f"{self.host}:{self.grpc_port}"))

    def node(self) -> Any:
        """Its `Node`, as its own programs see it."""
        from appliance.drivers import configfile
        from appliance.node.context import Node

        return Node.at(configfile.load({**self.environ, "TEI_MANAGER_CONFIG": str(self.config)}))

    def node_id(self) -> str:
        """The id that this appliance's processes carry."""
        return str(self.node().id)

    def left_over(self) -> list[psutil.Process]:
        """Every live process of the cast and the instances."""
        found = processes.marked(MARKER, f"{self.node_id()}:", except_under=())
        return [process for process, _ in found if process.status() != psutil.STATUS_ZOMBIE]

    def processes_of(self, name: str, replica: int = 0) -> list[psutil.Process]:
        found = processes.marked(MARKER, f"{self.node_id()}:{name}:{replica}:", except_under=())
        return [process for process, _ in found]
