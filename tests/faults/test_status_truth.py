"""What REST, events and metrics say of an instance is so: `running` is a promise, each replacement counts once, and a
death that a call has caused is told as that.

One appliance for all; TEI is a stand-in that dies or answers wrongly on a word, as the real one does of some calls.
"""

import socketserver
import sys
import threading
import time
import xmlrpc.client
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from xmlrpc.server import SimpleXMLRPCDispatcher, SimpleXMLRPCRequestHandler

import grpc
import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from supervisor.xmlrpc import Faults

from appliance.core.problems import Problem
from appliance.core.settings import parse
from appliance.monitor.golden import TEXTS
from appliance.node.context import Node
from appliance.operations import instances, supervision
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2_grpc import TeiMultiplexerStub
from testing.background import Background
from testing.running import TINY, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
STAND_IN = f"""#!{sys.executable}
import argparse, math, os
from concurrent.futures import ThreadPoolExecutor
import grpc
from appliance.wire.tei.v1 import tei_pb2 as tei

flags = argparse.ArgumentParser()
for flag in ("--hostname", "--port", "--prometheus-port", "--model-id"):
    flags.add_argument(flag, required=True)
given, _ = flags.parse_known_args()
index = os.environ["TEI_APPLIANCE_REPLICA"].split(":")[2]

def info(raw, context):
    return tei.InfoResponse(model_id=given.model_id, max_concurrent_requests=512).SerializeToString()

def embed(raw, context):
    text = tei.EmbedRequest.FromString(raw).inputs
    if text != "a":
        print("asked for", text, flush=True)
    if "poison" in text:
        os.abort()
    if "nan on " + index in text:
        return tei.EmbedResponse(embeddings=[1, math.nan]).SerializeToString()
    return tei.EmbedResponse(embeddings=[len(text), sum(text.encode()) % 4099]).SerializeToString()

class Replica(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(info if details.method.endswith("/Info") else embed)

server = grpc.server(ThreadPoolExecutor(32), handlers=[Replica()], options=[("grpc.so_reuseport", 0)])
assert server.add_insecure_port(given.hostname + ":" + given.port)
server.start()
server.wait_for_termination()
"""


def right(text: str) -> list[float]:
    return [len(text), sum(text.encode()) % 4099]


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    folder = tmp_path_factory.mktemp("truth")
    binary = folder / "text-embeddings-router"
    binary.write_text(STAND_IN)
    binary.chmod(0o755)
    settings = f"health_check_interval_secs = 1\ntei_binary_path = '{binary}'"
    with RunningAppliance(folder, seeds="", settings=settings) as running:
        yield running


@contextmanager
def instance(appliance: RunningAppliance, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """One that the monitor has seen answer; it is gone afterwards."""
    yield made(appliance, name, **fields)
    appliance.delete(f"/instances/{name}")


def made(appliance: RunningAppliance, name: str, **fields: Any) -> dict[str, Any]:
    appliance.create(name, **{"model_id": TINY, "engine": "embedded", **fields})
    found = appliance.wait_ready(name)
    eventually(lambda: len(events(appliance, name, "ready")) == found["replicas"])
    return found


def events(appliance: RunningAppliance, name: str, *kinds: str) -> list[dict[str, Any]]:
    """Since the instance was created."""
    mine = [event for event in appliance.get("/events").json() if event["instance"] == name]
    created = max((at for at, event in enumerate(mine) if event["event"] == "created"), default=0)
    return [event for event in mine[created:] if event["event"] in kinds]


def restarts(appliance: RunningAppliance, name: str) -> tuple[int, dict[str, float]]:
    """What REST counts, and what the metrics count for each reason."""
    families = text_string_to_metric_families(appliance.get("/metrics").text)
    told = {
        sample.labels["reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tei_manager_instance_restarts_total" and sample.labels["instance"] == name
    }
    return appliance.instance(name)["restarts"], {reason: count for reason, count in told.items() if count}


def embed(appliance: RunningAppliance, name: str, text: str = "hello", timeout: float = 20) -> list[float]:
    request = tei.EmbedRequest(inputs=text, truncate=True, normalize=False)
    target = mux.Target(instance_name=name)
    return list(appliance.stub().Embed(mux.EmbedRequest(target=target, request=request), timeout=timeout).embeddings)


def http_embed(appliance: RunningAppliance, name: str) -> requests.Response:
    url = f"http://127.0.0.1:{appliance.http_port}/instances/{name}/embed"
    return requests.post(url, json={"inputs": "hello"}, timeout=20)


def code_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    found: grpc.StatusCode = caught.value.code()
    return found


@pytest.mark.parametrize("trials", [15, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(5400)])])
def test_a_call_that_follows_the_answer_running_succeeds(appliance: RunningAppliance, trials: int) -> None:
    """After a create and after a restart, polled without a pause, over gRPC and HTTP in turn."""
    failures: list[str] = []
    done: Counter[str] = Counter()
    stub, session = appliance.stub(), requests.Session()
    target = mux.Target(instance_name="promised")
    request = mux.EmbedRequest(target=target, request=tei.EmbedRequest(inputs="hello", truncate=True))
    for trial in range(trials):
        created = trial % 3 == 0
        if created:
            appliance.delete("/instances/promised")
            appliance.create("promised", model_id=TINY, engine="embedded")
        else:
            assert appliance.post("/instances/promised/restart").status_code == 200
        until = time.monotonic() + 60
        while session.get(f"{appliance.url}/instances/promised", timeout=60).json()["status"] != "running":
            assert time.monotonic() < until
        way = f"{'gRPC' if trial % 2 else 'HTTP'} after a {'create' if created else 'restart'}"
        done[way] += 1
        if trial % 2:
            try:
                stub.Embed(request, timeout=20)
            except grpc.RpcError as error:
                failures.append(f"{way}: {error.code()}: {error.details()}")
        elif (answer := http_embed(appliance, "promised")).status_code != 200:
            failures.append(f"{way}: {answer.text}")
    appliance.delete("/instances/promised")
    print(f"{dict(done)}; {len(failures)} failed")
    assert not failures


def test_what_supervisorctl_stops_is_stopped_for_all_and_starts_again(appliance: RunningAppliance) -> None:
    with instance(appliance, "halted", replicas=2):
        assert appliance.post("/instances/halted/stop").status_code == 200
        asked = code_of(lambda: embed(appliance, "halted")), http_embed(appliance, "halted").status_code
        assert asked[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert appliance.post("/instances/halted/start").status_code == 200
        appliance.wait_ready("halted")
        eventually(lambda: len(events(appliance, "halted", "ready")) == 4)

        appliance.supervisorctl("stop", "halted:*")
        assert (code_of(lambda: embed(appliance, "halted")), http_embed(appliance, "halted").status_code) == asked
        found = appliance.instance("halted")
        assert [found["status"], *(each["status"] for each in found["replica_list"])] == ["stopped"] * 3
        eventually(lambda: len(events(appliance, "halted", "stopped")) > 2)
        told = events(appliance, "halted", "stopped")[1:]
        assert sorted(event["replica"] for event in told) == [0, 1]
        assert all(event["message"].endswith("was stopped with supervisorctl") for event in told)

        appliance.supervisorctl("start", "halted:*")
        appliance.wait_ready("halted")
        assert len(embed(appliance, "halted")) == 32
        eventually(lambda: len(events(appliance, "halted", "ready")) == 6)
        assert len(events(appliance, "halted", "stopped")) == 3
        assert not events(appliance, "halted", "died")
        assert restarts(appliance, "halted") == (0, {})


def test_each_replacement_counts_once_and_for_one_reason(appliance: RunningAppliance) -> None:
    with instance(appliance, "counted", replicas=2):
        assert restarts(appliance, "counted") == (0, {})
        appliance.processes_of("counted", 1)[0].kill()
        eventually(lambda: len(events(appliance, "counted", "ready")) == 3)
        assert restarts(appliance, "counted") == (1, {"crash": 1})
        assert appliance.post("/instances/counted/restart").status_code == 200
        appliance.wait_ready("counted")
        eventually(lambda: len(events(appliance, "counted", "ready")) == 5)
        assert restarts(appliance, "counted") == (3, {"crash": 1, "asked": 2})  # each replica, one after the other
        assert len(events(appliance, "counted", "died")) == 1


def test_a_frozen_replica_is_withheld_in_time_while_work_on_another_group_is_under_way(
    appliance: RunningAppliance,
) -> None:
    """`late` never opens its port, and is to be quarantined while somebody has the lock of its group."""
    with instance(appliance, "frozen", replicas=2):
        own = appliance.node()
        appliance.create("late", model_id=TINY, engine="embedded", startup_timeout_secs=1)
        eventually(lambda: appliance.processes_of("late"))[0].suspend()
        with supervision.group_lock(own, "late", wait=True):
            eventually(lambda: appliance.instance("late")["replica_list"][0]["status"] == "failed")  # to be quarantined
            appliance.processes_of("frozen", 1)[0].suspend()
            eventually(lambda: events(appliance, "frozen", "unhealthy"), timeout=20)
            eventually(lambda: restarts(appliance, "frozen") == (1, {"missed_probes": 1}), timeout=20)
            # Both while the lock is held, for which somebody may wait longer than both may take.
            assert not events(appliance, "late", "quarantined")
        eventually(lambda: events(appliance, "late", "quarantined"), timeout=10)
        eventually(lambda: len(events(appliance, "frozen", "ready")) == 3)
        assert restarts(appliance, "frozen") == (1, {"missed_probes": 1})
        assert not events(appliance, "frozen", "died")
        appliance.delete("/instances/late")


def test_a_deleted_instance_is_stopped_in_every_field_and_its_name_begins_anew(appliance: RunningAppliance) -> None:
    made(appliance, "again", replicas=2)
    old = appliance.get("/instances/again/logs").json()["lines"]
    assert old
    gone = appliance.delete("/instances/again").json()
    for each in (gone, *gone["replica_list"]):
        assert (each["status"], each["pid"], each["uptime_secs"]) == ("stopped", None, None)
    assert (gone["replicas_ready"], len(gone["replica_list"])) == (0, 2)
    logs = appliance.folder / "logs"
    assert (logs / "deleted" / "again-0.log").read_text().splitlines()[: len(old)] == old
    assert not list(logs.glob("again-*"))
    with instance(appliance, "again"):
        new = appliance.get("/instances/again/logs").json()["lines"]
        assert new
        assert not set(old) & set(new)


def monitor(appliance: RunningAppliance) -> psutil.Process:
    """The process that runs."""
    (found,) = [each for each in appliance.node().supervisor.processes() if each.group == "monitor"]
    assert found.pid
    return psutil.Process(found.pid)


def looked(appliance: RunningAppliance, name: str) -> str:
    """When the monitor has asked a replica last."""
    found: str = appliance.instance(name)["last_health_check"]
    return found


@pytest.mark.parametrize("way", ["restarted", "killed, and again at its first look"])
def test_a_monitor_that_starts_anew_tells_nothing_twice(appliance: RunningAppliance, way: str) -> None:
    with instance(appliance, "watched", replicas=2):
        before, first = looked(appliance, "watched"), monitor(appliance)
        if way == "restarted":
            appliance.supervisorctl("restart", "monitor")
        else:
            first.kill()
            written = appliance.folder / "health.json"
            at = written.stat().st_mtime_ns
            eventually(lambda: written.stat().st_mtime_ns != at, every=0.001)
            eventually(lambda: monitor(appliance) != first)
            monitor(appliance).kill()
        for _ in range(2):  # not the first look alone
            before = eventually(lambda before=before: (now := looked(appliance, "watched") or "") > before and now)
        assert len(events(appliance, "watched", "ready")) == 2
        assert not events(appliance, "watched", "died", "unhealthy", "recovered", "stopped")
        assert restarts(appliance, "watched") == (0, {})


# -- calls that end replicas, and answers that cannot be right ---------------------------------------------------------


class Innocents(Background):
    """Threads that call one instance over and over."""

    def __init__(self, appliance: RunningAppliance, name: str, threads: int = 4) -> None:
        super().__init__()
        self.appliance, self.name = appliance, name
        self.answers = 0
        self.errors: list[str] = []
        self.slowest = 0.0
        self.threads = [threading.Thread(target=self.call, args=(number,)) for number in range(threads)]

    def call(self, number: int) -> None:
        # A connection of its own, as other programs have: the kernel gives it to any of the multiplexers.
        options = [("grpc.use_local_subchannel_pool", 1)]
        stub: Any = TeiMultiplexerStub(grpc.insecure_channel(f"127.0.0.1:{self.appliance.grpc_port}", options=options))
        count = 0
        while self.paused():
            count += 1
            text, began = f"{number} innocent {count}", time.monotonic()
            request = tei.EmbedRequest(inputs=text, truncate=True, normalize=False)
            asked = mux.EmbedRequest(target=mux.Target(instance_name=self.name), request=request)
            try:
                assert list(stub.Embed(asked, timeout=20).embeddings) == right(text)
                self.answers += 1
            except (grpc.RpcError, AssertionError) as error:
                self.errors.append(f"{error}")
            self.slowest = max(self.slowest, time.monotonic() - began)


def test_calls_that_end_replicas_are_convicted_and_the_instance_goes_on(appliance: RunningAppliance) -> None:
    """Six texts that abort TEI, each of which ends both replicas before it is convicted."""
    with instance(appliance, "poisoned", engine="tei", replicas=2):
        golden = appliance.folder / "golden" / "poisoned.json"
        eventually(golden.exists)
        kept = golden.read_bytes()
        codes: Counter[tuple[grpc.StatusCode, str | None]] = Counter()
        with Innocents(appliance, "poisoned") as innocents:
            for number in range(6):
                with pytest.raises(grpc.RpcError) as caught:
                    embed(appliance, "poisoned", f"poison {number}", timeout=60)
                codes[caught.value.code(), dict(caught.value.trailing_metadata()).get("x-tei-code")] += 1
                time.sleep(1.5)  # not for a condition: this is how often they come
            eventually(lambda: appliance.instance("poisoned")["replicas_ready"] == 2, timeout=60)
        deaths = Counter(event["replica"] for event in events(appliance, "poisoned", "died"))
        print(
            f"{innocents.answers} innocent calls, {len(innocents.errors)} failed, slowest {innocents.slowest:.1f} s; "
            f"poison: {dict(codes)}; deaths {dict(deaths)}"
        )
        assert codes == {(grpc.StatusCode.INTERNAL, "ENDS_REPLICAS"): 6}
        assert innocents.answers > 300
        assert len(innocents.errors) <= 0.01 * innocents.answers, innocents.errors[:3]
        convicted = events(appliance, "poisoned", "convicted")
        assert [len(event["died"]) for event in convicted] == [2] * 6
        # Of twelve deaths one replica has had six, and to supervisor each was a failed start.
        assert "gave up: poisoned-" in (appliance.folder / "logs" / "supervisord.log").read_text()
        assert not events(appliance, "poisoned", "quarantined", "unhealthy")
        assert appliance.instance("poisoned")["status"] == "running"
        assert golden.read_bytes() == kept
        assert appliance.instance("poisoned")["health_check_failures"] == 0
        assert restarts(appliance, "poisoned") == (sum(deaths.values()), {"crash": sum(deaths.values())})


def test_a_wrong_answer_is_not_given_out_and_its_replica_is_compared_at_once(appliance: RunningAppliance) -> None:
    with instance(appliance, "doubted", engine="tei", replicas=2):

        def compared() -> list[int]:
            logs = [appliance.get("/instances/doubted/logs", replica=index).json()["lines"] for index in (0, 1)]
            return [sum(TEXTS[0] in line for line in lines) for lines in logs]

        eventually(lambda: min(compared()) == 1)
        for _ in range(4):  # the wrong one is asked first in some of them
            assert embed(appliance, "doubted", "nan on 1") == right("nan on 1")
        began = time.monotonic()
        eventually(lambda: compared() == [1, 2], timeout=10)  # by itself it is once a minute
        print(f"compared after {time.monotonic() - began:.1f} s")
        assert appliance.instance("doubted")["replicas_ready"] == 2
        assert not events(appliance, "doubted", "unhealthy")


# -- a create that is refused ------------------------------------------------------------------------------------------


class ShuttingDown(socketserver.ThreadingMixIn, socketserver.UnixStreamServer, SimpleXMLRPCDispatcher):
    """A supervisord that begins to shut down at a certain call."""

    logRequests = False
    answers: ClassVar = {
        "processes": "[]",
        "reread": [["x"], [], []],
    }

    def __init__(self, path: Path, at: str) -> None:
        SimpleXMLRPCDispatcher.__init__(self)
        super().__init__(str(path), Handler)
        self.at = at

    def _dispatch(self, method: str, parameters: Any) -> Any:
        name = method.partition(".")[2]
        if name == self.at:
            raise xmlrpc.client.Fault(Faults.SHUTDOWN_STATE, "SHUTDOWN_STATE")
        return self.answers[name]


class Handler(SimpleXMLRPCRequestHandler):
    disable_nagle_algorithm = False  # which a unix socket has not


@pytest.mark.parametrize("at", ["processes", "reread", "addProcessGroup"])
def test_a_create_that_supervisord_refuses_leaves_nothing(tmp_path: Path, at: str) -> None:
    appliance = Node.at(parse({}, {}, {}, str(tmp_path)))
    with ShuttingDown(tmp_path / "supervisor.sock", at) as supervisord:
        thread = threading.Thread(target=supervisord.serve_forever)
        thread.start()
        try:
            with pytest.raises(Problem, match="shutting down") as caught:
                instances.create(appliance, {"name": "x", "model_id": TINY})
        finally:
            supervisord.shutdown()
            thread.join()
    assert caught.value.code == "BACKEND_UNAVAILABLE"
    assert not appliance.state.read().instances
    assert not appliance.journal.since(0)


# -- an appliance that starts anew -------------------------------------------------------------------------------------


@pytest.mark.long  # last, because it starts the appliance of this module anew
def test_an_appliance_that_starts_anew_tells_no_deaths(appliance: RunningAppliance) -> None:
    with instance(appliance, "reborn"):
        appliance.stop()
        appliance.up()
        appliance.wait_ready("reborn")
        eventually(lambda: len(events(appliance, "reborn", "ready")) == 2)
        assert not events(appliance, "reborn", "died", "stopped")
        assert restarts(appliance, "reborn") == (0, {})
