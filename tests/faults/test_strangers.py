"""Somebody else listens on a replica's port: another appliance, another engine, any server. Nobody gets his vectors.

Callers ask all the while, over gRPC alone and in streams, in batches and over HTTP; a call may be refused, and what is
answered is compared with what the model itself says. The strangers tell how many calls have reached them: none.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import psutil
import pytest
import requests

from appliance.drivers import ports
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.arrows import dense_request, vectors
from testing.background import Background
from testing.doors import DOOR
from testing.engines import FAMILIES, Engine
from testing.running import RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
REFUSED_SECS = 0.01  # after which a caller calls again
CALL_SECS = 3.0  # a batch waits for a replica that is away
TEXTS = [f"text {number} of a caller" for number in range(8)]
MINE, OTHERS, OTHER_WIDTH = (FAMILIES / name for name in ("bert-cls", "distilbert-mean", "bert-dense-tanh"))

# A web server that answers every path with the metrics of an engine that has had 4711 requests. It waits for its port.
WEB = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# TYPE te_request_count counter\\nte_request_count 4711\\n")
    do_POST = do_GET
    def log_message(self, *told): pass

print("tries", flush=True)
while True:
    try:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    except OSError:
        time.sleep(0.001)
"""


@contextmanager
def script(text: str, *arguments: object) -> Iterator[int]:
    """The pid of a program that runs ``text``, and has begun to try for its port."""
    command = [sys.executable, "-S", "-c", text, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "tries\n"
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def web(port: int) -> Iterator[int]:
    with script(WEB, port) as pid:
        eventually(lambda: ports.answers("127.0.0.1", port))
        yield pid


class Callers(Background):
    """Threads that call instances over and over in every way; ``wrong`` has each vector that is not the model's own."""

    total: ClassVar[Counter[str]] = Counter()  # of all tests of this module

    def __init__(self, running: RunningAppliance, right: np.ndarray, *names: str) -> None:
        super().__init__()
        self.running, self.right, self.names = running, right, names
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        ways = (self.embed, self.stream, self.arrow, self.http)
        self.threads = [threading.Thread(target=self.call, args=(way,)) for way in ways]

    def call(self, way: Callable[[Any, str], list[Any]]) -> None:
        session = self.running.stub() if way != self.http else requests.Session()
        for name in itertools.cycle(self.names):
            if self.ended.is_set():
                return
            try:
                found = way(session, name)
            except (grpc.RpcError, requests.RequestException) as error:
                self.counts[f"{reason(error)} of {way.__name__}"] += 1
                self.ended.wait(REFUSED_SECS)
                continue
            self.counts[way.__name__] += 1
            self.ended.wait(self.pause_secs)
            if not is_right(found, self.right):
                self.wrong.append(f"{way.__name__} {name}: {found}"[:300])

    def request(self, name: str, text: str) -> Any:
        inner = tei.EmbedRequest(inputs=text, truncate=True, normalize=True)
        return mux.EmbedRequest(target=mux.Target(instance_name=name), request=inner)

    def embed(self, stub: Any, name: str) -> list[Any]:
        return [stub.Embed(self.request(name, TEXTS[0]), timeout=CALL_SECS).embeddings]

    def stream(self, stub: Any, name: str) -> list[Any]:
        requests = iter([self.request(name, text) for text in TEXTS])
        return [reply.embeddings for reply in stub.EmbedStream(requests, timeout=CALL_SECS)]

    def arrow(self, stub: Any, name: str) -> list[Any]:
        return list(vectors(stub.EmbedArrow(dense_request(name, list(TEXTS)), timeout=CALL_SECS)))

    def http(self, session: requests.Session, name: str) -> list[Any]:
        url = f"http://127.0.0.1:{self.running.http_port}/v1/embeddings"
        response = session.post(url, json={"model": name, "input": TEXTS}, timeout=CALL_SECS)
        response.raise_for_status()
        return [each["embedding"] for each in response.json()["data"]]

    @property
    def calls(self) -> int:
        return sum(self.counts.values())

    def __exit__(self, kind: type | None = None, *_: object) -> None:
        super().__exit__()
        Callers.total.update(self.counts)
        print(f"{self.calls} calls, {len(self.wrong)} with vectors of a stranger: {dict(self.counts)}")
        assert kind or not self.wrong, self.wrong[:5]


def reason(error: grpc.RpcError | requests.RequestException) -> str:
    """For the totals: the code with which a call was refused, or how it ended without one, as at its deadline."""
    if isinstance(error, grpc.RpcError):
        return str(error.code().name)
    return str(error.response.status_code) if error.response is not None else type(error).__name__


def is_right(found: list[Any], right: np.ndarray) -> bool:
    rows = np.array(found, np.float32)
    return rows.shape[1:] == right.shape[1:] and np.allclose(rows, right[: len(rows)], atol=1e-4)


class Site:
    """Two appliances that give their instances ports of the same range. The first one has `d`, whose port it chose, and
    `fixed`, whose ports were asked for."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        settings = "health_check_interval_secs = 1"
        self.first = held.enter_context(RunningAppliance(made(folder / "first"), seeds="", settings=settings))
        start, end = self.first.instance_ports
        shared = {"TEI_MANAGER_INSTANCE_PORT_START": str(start), "TEI_MANAGER_INSTANCE_PORT_END": str(end)}
        second = RunningAppliance(made(folder / "second"), seeds="", settings=settings, environ=shared)
        self.second = held.enter_context(second)
        self.asked = start + 60
        asked = {"port": self.asked, "prometheus_port": self.asked + 1}
        self.first.create("d", model_id=str(MINE))
        self.first.create("fixed", model_id=str(MINE), **asked)
        for name in ("d", "fixed"):
            self.first.wait_ready(name)
        self.callers = Callers(self.first, np.empty((0, 0)))
        self.right = np.array(self.callers.stream(self.first.stub(), "d"), np.float32)
        eventually(lambda: all(self.golden(name).exists() for name in ("d", "fixed")))
        self.kept = {name: self.golden(name).read_bytes() for name in ("d", "fixed")}

    def golden(self, name: str) -> Path:
        return self.first.folder / "golden" / f"{name}.json"

    def calling(self, *names: str) -> Callers:
        return Callers(self.first, self.right, *names or ("d", "fixed"))

    def port(self, name: str) -> int:
        return int(self.first.instance(name)["port"])

    def moves(self) -> list[dict[str, Any]]:
        return [event for event in self.first.get("/events").json() if event["event"] == "moved"]

    def stopped(self) -> None:
        for name in ("d", "fixed"):
            if self.first.instance(name)["status"] != "stopped":
                assert self.first.post(f"/instances/{name}/stop").status_code == 200
            eventually(lambda name=name: self.first.instance(name)["status"] == "stopped")

    def running(self) -> None:
        for name in ("d", "fixed"):
            if self.first.instance(name)["status"] in ("stopped", "failed"):
                assert self.first.post(f"/instances/{name}/start").status_code == 200
        for name in ("d", "fixed"):
            self.is_sound(name)

    def told_until(self, name: str, status: str) -> list[dict[str, Any]]:
        """What REST tells of an instance, asked without a pause until it has this status."""
        told: list[dict[str, Any]] = []

        def reached() -> bool:
            told.append(self.first.instance(name))
            return bool(told[-1]["status"] == status)

        eventually(reached, every=0)
        return told

    def is_sound(self, name: str) -> None:
        """It runs, with the vectors of its model, and its golden answers are what they were."""
        found = self.first.wait_ready(name)
        assert (found["status"], found["last_error"]) == ("running", None)
        assert is_right(self.callers.stream(self.first.stub(), name), self.right)
        assert self.golden(name).read_bytes() == self.kept[name]

    def refuses(self, verb: str, pid: int, command: str) -> None:
        """`fixed` cannot be started, and is told by whom."""
        response = self.first.post(f"/instances/fixed/{verb}")
        assert (response.status_code, response.json()["code"]) == (409, "PORT_IN_USE")
        assert f"in use by process {pid} (" in response.json()["error"]
        assert command in response.json()["error"]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as held:
        yield Site(tmp_path_factory.mktemp("strangers"), held)
    print(f"in all {Callers.total.total()} calls: {dict(Callers.total)}")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with another model whose vectors are as wide."""
    with Engine(tmp_path_factory.mktemp("other"), OTHERS) as engine:
        eventually(lambda: ports.answers("127.0.0.1", engine.metrics_port))
        yield engine


def requests_of(engine: Engine) -> float:
    """The calls that an engine has had."""
    text = requests.get(f"http://127.0.0.1:{engine.metrics_port}/metrics", timeout=5).text
    return sum(float(each) for each in re.findall(r"^te_request_count(?:\{.*\})? (\S+)$", text, re.MULTILINE))


def test_another_appliance_takes_the_port_of_a_stopped_instance(site: Site) -> None:
    """It is started on another one, where the appliance chose; where an operator did, he is told who has it."""
    site.running()
    before = site.port("d")
    with site.calling(), ExitStack() as held:
        site.stopped()
        theirs = {}
        for number in range(20):
            theirs = site.second.create(f"theirs{number}", model_id=str(OTHERS))
            held.callback(site.second.delete, f"/instances/theirs{number}")
            if theirs["port"] == before:
                break
        assert theirs["port"] == before
        site.second.create("fixed", model_id=str(OTHERS), port=site.asked)
        held.callback(site.second.delete, "/instances/fixed")
        site.second.wait_ready(theirs["name"])
        pid = site.second.wait_ready("fixed")["pid"]
        moved = len(site.moves())
        started = site.first.post("/instances/d/start")
        assert started.status_code == 200, started.text
        site.is_sound("d")
        assert site.port("d") == started.json()["port"] != before
        (event,) = site.moves()[moved:]
        assert f"port {before} is in use by process {site.second.instance(theirs['name'])['pid']} (" in event["message"]
        assert event["ports"] == [site.port("d")]
        site.refuses("start", pid, "appliance.engine")
        assert site.first.instance("fixed")["status"] == "stopped"
        assert site.second.delete("/instances/fixed").status_code in (200, 204)
        site.running()


@pytest.mark.parametrize("kind", ["web server", "engine of other width"])
def test_a_stranger_takes_the_port_of_a_stopped_instance(site: Site, tmp_path: Path, kind: str) -> None:
    site.running()
    with site.calling(), ExitStack() as held:

        def take(port: int) -> int:
            if kind == "web server":
                return held.enter_context(web(port))
            return held.enter_context(Engine(tmp_path, OTHER_WIDTH, port=port)).process.pid

        site.stopped()
        pid = take(site.asked)
        for verb in ("start", "restart"):
            before, moved = site.port("d"), len(site.moves())
            take(before)
            started = site.first.post(f"/instances/d/{verb}")
            assert started.status_code == 200, started.text
            site.is_sound("d")
            assert site.port("d") != before
            assert [event["ports"] for event in site.moves()[moved:]] == [[site.port("d")]]
            site.refuses(verb, pid, "http.server" if kind == "web server" else "bert-dense-tanh")
            assert site.first.instance("fixed")["status"] == "stopped"
            site.stopped()


def test_a_stranger_takes_the_port_of_a_new_instance_while_it_loads(site: Site, other: Engine) -> None:
    """No answer of his becomes a golden one."""
    asked = requests_of(other)
    with site.calling("moving", "staying"), ExitStack() as held:
        before = site.first.create("moving", model_id=str(MINE))["port"]
        held.callback(site.first.delete, "/instances/moving")
        held.enter_context(script(DOOR, before, other.port))
        port = site.first.create("staying", model_id=str(MINE), port=site.asked + 10)["port"]
        held.callback(site.first.delete, "/instances/staying")
        pid = held.enter_context(script(DOOR, port, other.port))
        eventually(lambda: site.first.instance("moving")["port"] != before)
        eventually(lambda: site.golden("moving").exists())
        learned, known = (json.loads(site.golden(name).read_text())["answers"] for name in ("moving", "d"))
        for one, right in zip(learned, known, strict=True):
            assert one == pytest.approx(right, abs=1e-4)
        found = site.told_until("staying", "failed")[-1]
        assert f"its port is in use by process {pid} (" in found["last_error"]
        assert not site.golden("staying").exists()
    assert requests_of(other) == asked


@pytest.mark.parametrize("least_calls", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_stranger_takes_the_port_of_a_replica_that_dies(site: Site, other: Engine, least_calls: int) -> None:
    """He is there before supervisord starts the next process."""
    stranger = np.array([other.stub("Embed").Embed(tei.EmbedRequest(inputs=text)).embeddings for text in TEXTS])
    assert not np.allclose(stranger, site.right, atol=0.1)
    asked = requests_of(other)
    assert asked == len(TEXTS)
    took = []
    with site.calling() as callers:
        while True:
            took.append(one_death(site, other.port))
            if callers.calls > least_calls:
                break
            assert site.first.post("/instances/d/restart").status_code == 200  # or its deaths would add up
    print("on another port, and told who has the asked one, after", ", ".join(f"{secs:.1f} s" for secs in took))
    assert requests_of(other) == asked


def one_death(site: Site, strangers_port: int) -> float:
    """Both instances lose their processes and ports at once, and a moment later the monitor looks at that.

    Returns the seconds until `d` runs again.
    """
    site.running()
    before, moved = site.port("d"), len(site.moves())
    with script(DOOR, before, strangers_port) as one, script(DOOR, site.asked, strangers_port) as pid:
        site.first.supervisorctl("stop", "monitor")  # or it would be over before a caller notices
        began = time.monotonic()
        for name in ("d", "fixed"):
            (process,) = site.first.processes_of(name)
            process.kill()
            process.wait(10)
        eventually(lambda: ports.answers("127.0.0.1", before) and ports.answers("127.0.0.1", site.asked))
        told = [site.first.instance(name) for _ in range(50) for name in ("d", "fixed")]
        site.first.supervisorctl("start", "monitor")
        told += site.told_until("fixed", "failed")
        assert "running" not in [found["status"] for found in told if found["port"] in (before, site.asked)]
        assert {found["pid"] for found in told} > {None}  # supervisord has tried
        assert f"port is in use by process {pid} (" in told[-1]["last_error"]
        eventually(lambda: len(site.moves()) > moved)
        site.is_sound("d")
        took = time.monotonic() - began
        assert site.port("d") != before
        (event,) = site.moves()[moved:]
        assert f"port {before} is in use by process {one} (" in event["message"]
        site.refuses("start", pid, "import socket")
        examined = {each["what"]: each for each in json.loads(site.first.cli("doctor", "--json").stdout)}
        finding = examined[f"port {site.asked}"]
        assert finding["verdict"] == "wrong"
        assert f"of fixed: in use by process {pid} (" in finding["found"]
    return took


def test_a_metrics_port_that_is_taken_costs_the_metrics_and_nothing_else(site: Site) -> None:
    site.running()
    with site.calling():
        site.stopped()
        theirs = {name: site.first.instance(name)["prometheus_port"] for name in ("d", "fixed")}
        with web(theirs["d"]), web(theirs["fixed"]):
            site.running()
            assert site.first.instance("fixed")["prometheus_port"] == theirs["fixed"]
            assert site.first.instance("d")["prometheus_port"] != theirs["d"]
            text = site.first.get("/metrics").text
            assert " 4711" not in text  # the digits alone may be part of a number of ours
            assert 'te_request_count{instance="d"' in text
            assert not re.search(r'^te_.*instance="fixed"', text, re.MULTILINE)
            assert f"Port {theirs['fixed']} on 127.0.0.1 cannot be used for metrics" in "".join(
                site.first.get("/instances/fixed/logs").json()["lines"]
            )


def test_a_start_that_is_refused_moves_nothing(site: Site) -> None:
    """A metrics port that was lost at a crash: the next real start finds another one."""
    site.running()
    port, moved = site.first.instance("d")["prometheus_port"], site.moves()
    with site.calling(), script(WEB, port) as stranger:
        (process,) = site.first.processes_of("d")
        (supervisord,) = [parent for parent in process.parents() if "supervisor.supervisord" in parent.cmdline()]
        supervisord.suspend()  # or the next process of the replica could have the port before the stranger
        process.kill()
        # Not merely that the port answers: the process that dies may still do so.
        eventually(lambda: port in [each.laddr.port for each in psutil.Process(stranger).net_connections()])
        supervisord.resume()
        eventually(lambda: site.first.instance("d")["pid"] not in (None, process.pid))
        site.is_sound("d")
        assert not re.search(r'^te_.*instance="d"', site.first.get("/metrics").text, re.MULTILINE)
        refused = site.first.post("/instances/d/start")
        assert (refused.status_code, refused.json()["code"]) == (409, "ALREADY_RUNNING")
        assert (site.first.instance("d")["prometheus_port"], site.moves()) == (port, moved)
        assert site.first.post("/instances/d/restart").status_code == 200
        site.is_sound("d")
        assert site.first.instance("d")["prometheus_port"] != port


def test_a_stranger_takes_the_port_while_the_appliance_is_down(site: Site, other: Engine) -> None:
    """As after a reboot of the machine, when something else is started first."""
    site.running()
    before, moved, asked = site.port("d"), len(site.moves()), requests_of(other)
    assert site.first.stop() == 0
    with script(DOOR, before, other.port), script(DOOR, site.asked, other.port) as pid:
        said = os.path.getsize(site.first.output)
        site.first.up()
        with site.calling() as callers:
            site.is_sound("d")
            assert [event["ports"] for event in site.moves()[moved:]] == [[site.port("d")]]
            assert site.port("d") != before
            found = site.told_until("fixed", "failed")[-1]
            assert f"its port is in use by process {pid} (" in found["last_error"]
            words = site.first.output.read_bytes()[said:].decode()
            assert f'Port {site.asked} of "fixed" is in use by process {pid} (' in words
            eventually(lambda: callers.calls > 300)
    assert requests_of(other) == asked
