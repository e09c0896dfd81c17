"""A restart of an instance with several replicas: one after the other, and no caller notices."""

import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import grpc
import pytest

from testing.background import Background
from testing.calling import WAYS
from testing.running import TINY, TINY_WIDTH, RunningAppliance, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("box"), seeds="") as running:
        yield running


class Callers(Background):
    """One for each way."""

    def __init__(self, box: RunningAppliance, name: str) -> None:
        super().__init__()
        self.box, self.name = box, name
        self.answers, self.problems = 0, list[Any]()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.call, args=(way,)) for way in WAYS]

    def call(self, way: Any) -> None:
        while self.paused():
            try:
                assert way(self.box, self.name) == TINY_WIDTH
            except (AssertionError, grpc.RpcError) as problem:
                self.problems.append(problem)
            with self.lock:
                self.answers += 1


def pids(box: RunningAppliance, name: str) -> list[int | None]:
    return [each["pid"] for each in box.instance(name)["replica_list"]]


def rolled(box: RunningAppliance, name: str) -> bool:
    return not box.instance(name)["rolling"]


def test_no_call_fails_and_one_replica_always_answers(box: RunningAppliance) -> None:
    box.create("pair", replicas=2)
    box.wait_ready("pair")
    before = pids(box, "pair")
    least = 2
    with Callers(box, "pair") as callers:
        answer = box.post("/instances/pair/restart")
        assert (answer.status_code, answer.json()["status"], answer.json()["rolling"]) == (200, "running", [0, 1])
        while not rolled(box, "pair"):
            least = min(least, box.instance("pair")["replicas_ready"])
            time.sleep(0.05)
    assert not callers.problems
    assert callers.answers > 20
    assert least == 1
    after = pids(box, "pair")
    assert not set(after) & set(before)
    assert box.instance("pair")["restarts"] == 2
    told = [each for each in box.get("/events").json() if each["instance"] == "pair"]
    words = [each["event"] for each in told]
    assert words.count("restarted") == 2
    assert words[-1] == "rolled"
    assert not {"died", "stopped", "quarantined", "unhealthy"} & set(words)


def test_at_once_where_that_is_asked_for(box: RunningAppliance) -> None:
    box.create("both", replicas=2)
    box.wait_ready("both")
    before = pids(box, "both")
    assert box.cli("instances", "restart", "both", "--at-once", "--wait").returncode == 0
    assert not set(pids(box, "both")) & set(before)
    assert box.instance("both")["rolling"] == []
    assert box.post("/instances/both/restart?rolling=perhaps").status_code == 422


def test_a_replica_that_is_stopped_is_started_too(box: RunningAppliance) -> None:
    """It comes last, and those before it are restarted only while all others answer."""
    box.create("halted", replicas=2)
    box.wait_ready("halted")
    before = pids(box, "halted")
    box.supervisorctl("stop", "halted:halted-1")
    assert box.post("/instances/halted/restart").json()["rolling"] == [0, 1]
    eventually(lambda: rolled(box, "halted"), 60)
    box.wait_ready("halted")
    assert not set(pids(box, "halted")) & {*before, None}


def test_the_next_verb_ends_it(box: RunningAppliance) -> None:
    box.create("ended", replicas=2)
    box.wait_ready("ended")
    for verb, status in (("stop", "stopped"), ("sleep", "sleeping")):
        assert box.post("/instances/ended/restart").json()["rolling"] == [0, 1]
        after = box.post(f"/instances/ended/{verb}").json()
        assert (after["status"], after["rolling"]) == (status, [])
        box.post("/instances/ended/start")
        box.wait_ready("ended")


def test_whoever_takes_over_goes_on_where_it_stands(box: RunningAppliance) -> None:
    """The monitor is killed at each step of one restart."""
    box.create("taken", replicas=2)
    box.wait_ready("taken")
    before = pids(box, "taken")
    assert box.post("/instances/taken/restart").status_code == 200
    seen: list[list[int | None]] = [before]
    until = time.monotonic() + 60
    while not rolled(box, "taken") and time.monotonic() < until:
        now = pids(box, "taken")
        if now != seen[-1]:  # something was done: its doer ends
            seen.append(now)
            for process in box.processes_of("monitor"):
                process.kill()
        time.sleep(0.02)
    eventually(lambda: rolled(box, "taken"), 60)
    box.wait_ready("taken")
    assert not set(pids(box, "taken")) & set(before)
    assert all(sum(one != other for one, other in zip(*both, strict=True)) == 1 for both in pairwise(seen))


def test_one_that_does_not_come_back_ends_it(box: RunningAppliance, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its files are damaged meanwhile; the other replica keeps its process, and answers."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, folder)
    box.create("half", model_id=str(folder), replicas=2)
    box.wait_ready("half")
    before = pids(box, "half")
    assert box.post("/instances/half/restart").status_code == 200
    (folder / "tokenizer.json").write_text("{}")
    eventually(lambda: rolled(box, "half"), 90)
    events = [each["event"] for each in box.get("/events").json() if each["instance"] == "half"]
    assert "roll_ended" in events
    assert pids(box, "half")[1] == before[1]
    assert WAYS[0](box, "half") == TINY_WIDTH
