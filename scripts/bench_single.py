"""`make bench PARTS=single`: what a single call costs on its ways to a replica that answers at once.

The replica is a bare threaded grpcio server: less than its own price no call through grpcio in Python can cost. Where
TEI_BINARY_PATH names a text-embeddings-router, all is measured over it as well, with a model of two layers of 32. Ways:
to its own port; through an Envoy that only passes on, the price of a proxy that is not Python; through the multiplexer;
through the express lane, as a call of the multiplexer and as TEI's own. One load generator for all, which takes most of
two cores with 16 callers. The ways take turns, medians of ROUNDS.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import orjson
import psutil

from appliance.core.instance import InstanceSpec
from appliance.core.program import LOG_VARIABLE, MARKER, NO_REQUEST_LINES, arguments, marker
from appliance.core.state import Instance, with_instance
from appliance.drivers import envoy
from appliance.drivers.statefile import StateFile
from appliance.export.envoy import http
from appliance.export.envoy_front import socket_address
from appliance.export.express_lane import EXTENSION, TYPE, Config, extension
from appliance.express.__main__ import CORES_PER_THREAD
from appliance.node.context import node_id
from appliance.wire.envelope import INSTANCE_KEY
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.running import TINY, eventually, free_ports

ROUNDS, SECS = 5, 2.0
CALLERS = (1, 16)
NAME = "stub"
EMBED, TEI_EMBED = "/tei_multiplexer.v1.TeiMultiplexer/Embed", "/tei.v1.Embed/Embed"
DIRECT = tei.EmbedRequest(inputs="x")
WRAPPED = mux.EmbedRequest(target=mux.Target(instance_name=NAME), request=DIRECT)


class Way(NamedTuple):
    """How a call goes: to which address, as which; between: the processes on the way."""

    name: str
    address: str
    path: str
    message: bytes
    metadata: tuple[tuple[str, str], ...]
    between: list[psutil.Process]


class Measured(NamedTuple):
    """p50: seconds; rate: calls a second; cpu: of the processes on the way, seconds a call."""

    p50: float
    rate: float
    cpu: float


class Stand:
    """A replica and a multiplexer without supervisord. ports: five that are free. binary: TEI's; None where the
    replica is the bare server. express: Envoy is before it."""

    def __init__(self, room: Path, ports: list[int], binary: str | None, express: bool) -> None:
        room.mkdir(parents=True)
        self.room, self.replica_port, metrics_port, *own = room, *ports
        self.port = own[1]
        variables = ("TEI_MANAGER_API_PORT", "TEI_MANAGER_GRPC_PORT", "TEI_MANAGER_HTTP_PORT")
        self.environ = {**os.environ, "TEI_MANAGER_DATA_DIR": str(room)}
        self.environ |= {key: str(port) for key, port in zip(variables, own, strict=True)}
        self.environ[LOG_VARIABLE] = NO_REQUEST_LINES
        # Without the cache, which would answer in place of the replica.
        spec = InstanceSpec(NAME, TINY, pooling="cls", max_concurrent_requests=4096, cache=False, express=express)
        instance = Instance(spec, (self.replica_port,), (metrics_port,), created_at="now")
        StateFile(room / "state.toml", now=str, on_repair=print).update(lambda state: with_instance(state, instance))
        stub = (sys.executable, str(Path(__file__).with_name("bench_stub.py")), str(self.replica_port))
        self.replica = self.run(NAME, instance.launch, *((binary, *arguments(instance, 0)) if binary else stub))
        self.multiplexer = self.run("multiplexer", 0, sys.executable, "-m", "appliance.multiplexer")
        self.processes = [self.replica, self.multiplexer]
        if express:
            self.processes.append(self.run("express", 0, sys.executable, "-m", "appliance.express"))
            eventually(lambda: envoy.ask(room / "express.sock", "GET", "/ready"))
        self.between = [psutil.Process(self.multiplexer.pid), *psutil.Process(self.processes[-1].pid).children()]

    def run(self, name: str, launch: int, *command: str) -> "subprocess.Popen[bytes]":
        bears = {MARKER: marker(node_id(str(self.room)), name, 0, launch)}
        with (self.room / f"{name}.out").open("wb") as output:
            return subprocess.Popen(command, env=self.environ | bears, stdout=output, stderr=output)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait()


def single(room: Path) -> dict[str, list[tuple[str, ...]]]:
    """A table for each replica and number of callers, under its title."""
    replicas: dict[str, str | None] = {"a replica that answers at once": None}
    if binary := os.environ.get("TEI_BINARY_PATH"):
        replicas[f"{Path(binary).name} with a tiny model"] = binary
    return {
        f"a single call to {replica}, {count} at a time": lines
        for at, (replica, binary) in enumerate(replicas.items())
        for count, lines in tables(room / str(at), binary).items()
    }


def tables(room: Path, binary: str | None) -> dict[int, list[tuple[str, ...]]]:
    """A table for each number of callers. binary: as of `Stand`."""
    *ports, bare_port = free_ports(11)
    direct, own = DIRECT.SerializeToString(), ((INSTANCE_KEY, NAME),)
    with (
        closing(Stand(room / "plain", ports[:5], binary, False)) as plain,
        closing(Stand(room / "lane", ports[5:], binary, True)) as lane,
        bare_envoy(room, bare_port, plain.replica_port) as bare,
    ):
        replica = psutil.Process(plain.replica.pid)
        ways = [
            Way("the replica's own port", local(plain.replica_port), TEI_EMBED, direct, (), [replica]),
            Way("an Envoy that only passes on", local(bare_port), TEI_EMBED, direct, (), [bare]),
            wrapped_way("multiplexer", local(plain.port), plain.between),
            wrapped_way("express lane", local(lane.port), lane.between),
            Way("express lane, TEI's own call", local(lane.port), TEI_EMBED, direct, own, lane.between),
        ]
        for way in ways:
            eventually(lambda way=way: caller(way)() is None)
        return {count: table(ways, count) for count in CALLERS}


@contextmanager
def bare_envoy(room: Path, port: int, replica_port: int) -> Iterator[psutil.Process]:
    """Envoy with one listener, one route and one cluster: no Lua, no log, no metrics of ours. As many threads as the
    lane's has."""
    config, binary = room / "bare.json", envoy.binary()
    assert binary, "the extra `express` is not installed"
    config.write_bytes(orjson.dumps(bare_bootstrap(port, replica_port)))
    command = envoy.command(binary, config, max(1, (os.cpu_count() or 1) // CORES_PER_THREAD))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def bare_bootstrap(port: int, replica_port: int) -> Config:
    """The configuration of an Envoy before one replica, both over HTTP/2."""
    protocols = f"{EXTENSION}.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": TYPE + protocols, "explicit_http_config": {"http2_protocol_options": Config()}}
    endpoint = {"endpoint": {"address": socket_address("127.0.0.1", replica_port)}}
    cluster = {
        "name": NAME,
        "type": "STATIC",
        "typed_extension_protocol_options": {protocols: options},
        "load_assignment": {"cluster_name": NAME, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": NAME}}
    manager = {
        "stat_prefix": NAME,
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": NAME, "domains": ["*"], "routes": [route]}]},
        "http_filters": [extension("envoy.filters.http.router", f"{EXTENSION}.filters.http.router.v3.Router")],
    }
    listener = {
        "name": NAME,
        "address": socket_address("127.0.0.1", port),
        "filter_chains": [{"filters": [http(manager)]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def local(port: int) -> str:
    return f"127.0.0.1:{port}"


def wrapped_way(name: str, address: str, between: list[psutil.Process]) -> Way:
    """A call of the multiplexer."""
    return Way(name, address, EMBED, WRAPPED.SerializeToString(), (), between)


def table(ways: list[Way], callers: int) -> list[tuple[str, ...]]:
    """The first way's CPU is what the replica takes; that of the others is beside it."""
    rounds = [[measured(way, callers) for way in ways] for _ in range(ROUNDS)]
    lines: list[tuple[str, ...]] = [("way", "p50 ms", "added ms", "CPU, us a call", "calls a second", "ratio")]
    for at, way in enumerate(ways):
        own = [each[at] for each in rounds]
        added = statistics.median(each[at].p50 - each[0].p50 for each in rounds)
        ratio = statistics.median(each[at].rate / each[0].rate for each in rounds)
        p50, rate, cpu = (statistics.median(values) for values in zip(*own, strict=True))
        cells = (f"{p50 * 1e3:.2f}", f"{added * 1e3:+.2f}", f"{cpu * 1e6:.0f}", f"{rate:.0f}", f"{ratio:.2f}")
        lines.append((way.name, *cells))
    return lines


def caller(way: Way) -> Callable[[], None]:
    """One call over a connection of its own."""
    channel = grpc.insecure_channel(way.address, [("grpc.use_local_subchannel_pool", 1)])
    call = channel.unary_unary(way.path)

    def once() -> None:
        call(way.message, timeout=10, metadata=way.metadata)

    return once


def measured(way: Way, callers: int) -> Measured:
    calls = [caller(way) for _ in range(callers)]
    for call in calls:
        call()
    waits: list[float] = []
    until = time.perf_counter() + SECS
    before = sum(map(cpu_seconds, way.between))

    def many(call: Callable[[], None]) -> None:
        while (began := time.perf_counter()) < until:
            call()
            waits.append(time.perf_counter() - began)

    began = time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(many, calls))
    took = time.perf_counter() - began
    used = sum(map(cpu_seconds, way.between)) - before
    return Measured(statistics.median(waits), len(waits) / took, used / len(waits))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
