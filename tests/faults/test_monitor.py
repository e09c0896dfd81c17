"""Replicas that look alive and are not: hung, wrong, dying again and again. Real processes, real faults."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.core import health, state
from appliance.drivers import hub
from appliance.drivers.healthfile import HealthFile
from appliance.operations import repairs, supervision
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.background import Background
from testing.random_models import random_model
from testing.running import MINILM, RunningAppliance, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[RunningAppliance]:
    """An appliance that asks its replicas every second."""
    with RunningAppliance(tmp_path, seeds="", settings="health_check_interval_secs = 1") as running:
        yield running


class Callers(Background):
    """Threads that call one instance over and over; ``errors`` has every call that failed."""

    def __init__(self, running: RunningAppliance, name: str, threads: int = 3) -> None:
        super().__init__()
        self.running, self.name = running, name
        self.errors: list[str] = []
        self.answers = 0
        self.slowest = 0.0
        self.threads = [threading.Thread(target=self.call) for _ in range(threads)]

    def call(self) -> None:
        stub = self.running.stub()
        request = mux.EmbedRequest(
            target=mux.Target(instance_name=self.name), request=tei.EmbedRequest(inputs="hello", truncate=True)
        )
        while self.paused():
            began = time.monotonic()
            try:
                stub.Embed(request, timeout=60)
                self.answers += 1
            except grpc.RpcError as error:
                self.errors.append(f"{error.code()}: {error.details()}")
            self.slowest = max(self.slowest, time.monotonic() - began)


def events(running: RunningAppliance, name: str, kind: str) -> list[dict[str, Any]]:
    found = running.get("/events").json()
    return [event for event in found if event["instance"] == name and event["event"] == kind]


def status(running: RunningAppliance, name: str) -> tuple[str, list[str]]:
    found = running.instance(name)
    return found["status"], [replica["status"] for replica in found["replica_list"]]


@pytest.mark.parametrize("interval", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_hung_replica_is_out_of_routing_then_replaced_and_no_caller_notices(tmp_path: Path, interval: int) -> None:
    with RunningAppliance(tmp_path, seeds="", settings=f"health_check_interval_secs = {interval}") as running:
        a_hung_replica(running)


def a_hung_replica(own_appliance: RunningAppliance) -> None:
    own_appliance.create("two", replicas=2)
    own_appliance.wait_ready("two")
    eventually(lambda: len(events(own_appliance, "two", "ready")) == 2)
    with Callers(own_appliance, "two") as callers:
        (process,) = own_appliance.processes_of("two", 1)
        process.suspend()
        began = time.monotonic()
        eventually(lambda: status(own_appliance, "two")[1] == ["running", "unhealthy"], timeout=25)
        out = time.monotonic() - began
        assert own_appliance.instance("two")["health_check_failures"] >= 1
        eventually(lambda: own_appliance.instance("two")["restarts"] == 1, timeout=40)
        restarted = time.monotonic() - began
        eventually(lambda: status(own_appliance, "two")[1] == ["running", "running"], timeout=30)
    print(f"out of routing after {out:.1f} s, restarted after {restarted:.1f} s; slowest call {callers.slowest:.1f} s")
    assert not callers.errors
    assert callers.answers > 100
    (event,) = events(own_appliance, "two", "restarted")
    assert "missed 3 probes" in event["reason"]
    assert events(own_appliance, "two", "recovered")


@pytest.mark.long
def test_valid_long_texts_kill_no_replica_and_a_hang_under_them_is_found(tmp_path: Path) -> None:
    """Three texts of 8,192 tokens on two threads: the probe waits for more than 10 s behind the first two."""
    model = random_model(tmp_path / "model", width=384, layers=6, positions=8192)
    settings = "health_check_interval_secs = 1\ngrpc_request_timeout_secs = 200"
    with RunningAppliance(tmp_path, seeds="", settings=settings) as running:
        running.create("long", model_id=str(model), extra_args=["--threads", "2"])
        pid = running.wait_ready("long")["pid"]
        eventually(lambda: events(running, "long", "ready"))
        request = mux.EmbedRequest(
            target=mux.Target(instance_name="long"), request=tei.EmbedRequest(inputs="a " * 8192, truncate=True)
        )
        began = time.monotonic()
        calls = [running.stub().Embed.future(request, timeout=200) for _ in range(3)]
        assert [len(call.result().embeddings) for call in calls] == [384] * 3
        print(f"three long texts took {time.monotonic() - began:.1f} s")
        assert [event["event"] for event in running.get("/events").json() if event["event"] == "unhealthy"] == []
        assert running.instance("long")["pid"] == pid
        calls = [running.stub().Embed.future(request, timeout=200) for _ in range(3)]
        time.sleep(2)
        running.processes_of("long")[0].suspend()
        began = time.monotonic()
        eventually(lambda: running.instance("long")["restarts"] == 1, timeout=30)
        print(f"a frozen process with long texts was replaced after {time.monotonic() - began:.1f} s")
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_wrong_vectors_are_out_of_routing_and_a_second_time_quarantined(
    own_appliance: RunningAppliance, tmp_path: Path, killed: bool
) -> None:
    """The weights are mapped, so bytes that change in the file change the vectors of the running replica.

    It is compared once a minute, and after every restart: with ``killed`` the test does not wait for the minute.
    """
    model = tmp_path / "model"
    shutil.copytree(hub.find(MINILM), model)
    weights = model / "model.safetensors"
    right = weights.read_bytes()
    own_appliance.create("victim", model_id=str(model))
    own_appliance.create("neighbour")
    own_appliance.wait_ready("victim")
    golden = own_appliance.folder / "golden" / "victim.json"
    eventually(golden.exists, timeout=30)
    wrong = bytearray(right)
    wrong[len(right) // 2 :] = bytes(len(right) - len(right) // 2)
    with weights.open("r+b") as file:
        file.write(wrong)
    if killed:
        own_appliance.processes_of("victim")[0].kill()
    began = time.monotonic()
    (event,) = eventually(lambda: events(own_appliance, "victim", "unhealthy"), timeout=75)
    print(f"wrong vectors were noticed after {time.monotonic() - began:.1f} s: {event['message'][:200]}")
    assert "cosine" in event["message"]
    assert "times its norm" in event["message"]
    eventually(lambda: status(own_appliance, "victim")[0] == "failed", timeout=40)
    assert "wrong after a restart, too" in own_appliance.instance("victim")["last_error"]
    request = mux.EmbedRequest(target=mux.Target(instance_name="victim"), request=tei.EmbedRequest(inputs="a"))
    with pytest.raises(grpc.RpcError) as refused:
        own_appliance.stub().Embed(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert status(own_appliance, "neighbour")[0] == "running"
    with weights.open("r+b") as file:
        file.write(right)
    assert own_appliance.post("/instances/victim/start").status_code == 200
    own_appliance.wait_ready("victim")


def test_nothing_is_quarantined_for_what_the_launch_before_it_did(own_appliance: RunningAppliance) -> None:
    """The monitor may have looked when a start had changed the state, but not yet the processes."""
    own_appliance.create("one")
    pid = own_appliance.wait_ready("one")["pid"]
    node = own_appliance.node()
    instance = node.state.read().instances["one"]
    launch = instance.launch

    def quarantined(launch: int, **seen: Any) -> bool:
        repairs.quarantine(node, instance, 0, health.Look(launch, **seen), "as seen")
        return 0 in node.state.read().instances["one"].quarantined

    assert not quarantined(launch, state="FATAL")
    assert not quarantined(launch, state="RUNNING", pid=pid + 1)
    with supervision.group_lock(node, "one", wait=True):
        after = node.state.update(lambda before: state.restart(before, "one")).after
        late = threading.Thread(target=quarantined, args=(launch + 1,), kwargs={"state": "RUNNING", "pid": pid})
        late.start()
    late.join()
    assert after.instances["one"].launch == launch + 1
    assert not node.state.read().instances["one"].quarantined
    supervision.reconcile(node, {"one"})
    assert quarantined(launch + 1, state="RUNNING", pid=own_appliance.wait_ready("one")["pid"])


@pytest.mark.parametrize("lives_secs", [0, pytest.param(6, marks=pytest.mark.long)])
def test_a_crash_loop_is_quarantined_with_its_last_lines_and_start_lifts_it(
    own_appliance: RunningAppliance, lives_secs: int
) -> None:
    """With lives_secs past supervisor's startsecs each death is the first of its kind to supervisor."""
    own_appliance.create("looping")
    own_appliance.create("neighbour")
    own_appliance.wait_ready("looping")
    own_appliance.wait_ready("neighbour")
    with Callers(own_appliance, "neighbour", threads=1) as callers:
        while not events(own_appliance, "looping", "quarantined"):
            time.sleep(lives_secs)
            for process in own_appliance.processes_of("looping"):
                process.kill()
            time.sleep(1.5)
    assert not callers.errors
    found = own_appliance.instance("looping")
    assert (
        "died 5 times within 10 minutes" in found["last_error"] or "as often as it was started" in found["last_error"]
    )
    assert "Ready after" in found["last_error"]  # its own last log line
    eventually(lambda: not own_appliance.processes_of("looping"))
    assert own_appliance.get("/health").json()["status"] == "degraded"
    assert len(events(own_appliance, "looping", "died")) >= 1
    assert len(events(own_appliance, "looping", "quarantined")) == 1
    assert own_appliance.post("/instances/looping/start").status_code == 200
    own_appliance.wait_ready("looping")
    assert own_appliance.get("/health").json()["status"] == "healthy"


def test_a_replica_that_never_opens_its_port_is_failed_with_its_timeout(watched: RunningAppliance) -> None:
    own_appliance = watched
    own_appliance.create("slow", model_id=MINILM, startup_timeout_secs=2)
    process = eventually(lambda: own_appliance.processes_of("slow"), timeout=10)[0]
    process.suspend()
    eventually(lambda: status(own_appliance, "slow")[0] == "failed", timeout=20)
    eventually(lambda: "startup_timeout_secs" in (own_appliance.instance("slow")["last_error"] or ""), timeout=20)
    eventually(lambda: not process.is_running(), timeout=20)


@pytest.mark.long
def test_an_edited_include_file_and_a_foreign_group_are_put_right(own_appliance: RunningAppliance) -> None:
    own_appliance.create("kept")
    own_appliance.wait_ready("kept")
    conf = own_appliance.folder / "instances.conf"
    right = conf.read_text()
    pid = own_appliance.instance("kept")["pid"]
    conf.write_text(
        right + "\n[group:stranger]\nprograms=stranger-0\n\n[program:stranger-0]\ncommand=/bin/sleep 1000\n"
    )
    own_appliance.supervisorctl("update")
    assert "stranger" in own_appliance.supervisorctl("status")
    eventually(lambda: conf.read_text() == right, timeout=70)
    eventually(lambda: "stranger" not in own_appliance.supervisorctl("status"), timeout=20)
    assert own_appliance.instance("kept")["pid"] == pid


def test_no_process_that_a_reload_of_supervisord_ended_is_told_to_have_died(own_appliance: RunningAppliance) -> None:
    own_appliance.create("kept")
    own_appliance.wait_ready("kept")
    eventually(lambda: HealthFile(own_appliance.folder / "health.json").processes())
    own_appliance.supervisorctl("reload")
    eventually(lambda: len(events(own_appliance, "kept", "ready")) == 2, timeout=60)
    assert not events(own_appliance, "kept", "died")
