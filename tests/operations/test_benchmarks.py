"""Measurements: what is saturated, whom they are of, and when they are refused."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from appliance.core.benchmark import LEVELS, LoadStep, saturation
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.core.state import Instance, with_instance
from appliance.drivers import processes
from appliance.node import benchmarks, series
from appliance.node.benchmarks import ARGUMENT, DONE, FAILED, RUNNING, Benchmark
from appliance.node.context import Node
from appliance.operations import benchmarks as operations
from appliance.operations.benchmarks import BUSY_TEXTS, end
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux
from testing.engines import FAMILIES
from testing.running import RunningAppliance, eventually
from testing.specs import instance, spec


def steps(*rates: float) -> tuple[LoadStep, ...]:
    return tuple(LoadStep(level, rate, 1.0, 2.0, 10, 0, None) for level, rate in zip(LEVELS, rates, strict=False))


@pytest.mark.parametrize(
    ("rates", "callers"),
    [
        ((100, 190, 300, 310, 312, 311, 305), 4),
        ((100, 200, 400, 800, 1600, 3200, 6400), 64),
        ((100, 90, 80, 70, 60, 50, 40), 1),
        ((0, 0), None),
        ((), None),
    ],
)
def test_the_fewest_callers_that_come_near_the_best(rates: tuple[float, ...], callers: int | None) -> None:
    assert saturation(steps(*rates)) == callers


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))


def measured(of: Instance, pid: int, **fields: object) -> Benchmark:
    return Benchmark(of.name, of.created_at, "2026-01-01T00:00:00Z", 2.0, pid, **fields)  # type: ignore[arg-type]


@pytest.fixture
def other() -> Iterator[int]:
    """A process that looks like one that measures."""
    with subprocess.Popen(["sh", "-c", "read line", ARGUMENT], stdin=subprocess.PIPE) as process:
        yield process.pid


def test_one_is_of_the_very_instance_and_survives_its_reading(node: Node, other: int) -> None:
    one = instance(spec("a"))
    assert benchmarks.find(node, one) is None
    kept = measured(one, other, steps=steps(1, 2))
    benchmarks.write(node, kept)
    assert benchmarks.find(node, one) == kept
    assert benchmarks.find(node, replace(one, created_at="2030-01-01T00:00:00.000Z")) is None, "of its name"
    benchmarks.path_of(node, "a").write_text("{}")
    assert benchmarks.find(node, one) is None


def test_one_whose_process_has_gone_has_failed(node: Node) -> None:
    one = instance(spec("a"))
    benchmarks.write(node, measured(one, os.getpid(), status=RUNNING))
    found = benchmarks.find(node, one)
    assert found is not None
    assert (found.status, "ended before" in (found.error or "")) == (FAILED, True)
    with subprocess.Popen(["true"]) as ended:
        eventually(lambda: processes.is_zombie(ended.pid), 5)
        benchmarks.write(node, kept := measured(one, ended.pid, status=RUNNING))
        assert benchmarks.find(node, one) == kept, "who follows it has not written down yet how it ended"
    assert not benchmarks.is_running(kept)
    benchmarks.write(node, measured(one, os.getpid(), status=DONE, steps=steps(3)))
    found = benchmarks.find(node, one)
    assert found is not None
    assert found.mapping()["saturation"] == 1


def test_files_of_instances_that_are_gone_are_deleted(node: Node) -> None:
    for name in ("a", "b"):
        benchmarks.write(node, measured(instance(spec(name)), 1))
    benchmarks.forget_others(node, {"a"})
    assert os.listdir(node.layout.benchmarks) == ["a.json"]


def test_where_the_disk_has_no_room_nothing_is_measured(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    begun = list[psutil.Process]()
    node.state.update(lambda state: with_instance(state, instance(spec("a"))))
    monkeypatch.setattr(operations, "refuse_what_does_not_answer", lambda *_: None)
    monkeypatch.setattr(operations, "command", lambda *_: ["sleep", "600"])
    monkeypatch.setattr(operations, "end", lambda process: begun.append(psutil.Process(process.pid)) or end(process))
    monkeypatch.setattr(benchmarks, "write", write)
    with pytest.raises(Problem, match="No space left") as refused:
        operations.start(node, "a", force=True)
    assert refused.value.kind is Kind.EXHAUSTED
    assert [each.is_running() for each in begun] == [False]


@pytest.mark.processes
def test_it_measures_through_the_multiplexer_and_not_the_cache(tmp_path: Path) -> None:
    with RunningAppliance(tmp_path, seeds="", cache=True) as box:
        for name in ("one", "two"):
            box.create(name)
        assert box.post("/instances/one/bench").json()["code"] == "NOT_RUNNING"
        box.wait_ready("one")
        box.wait_ready("two")
        assert box.get("/instances/one/bench").json()["code"] == "NOT_MEASURED"
        for secs in ("nan", "0.1", "many"):
            assert box.post(f"/instances/one/bench?secs={secs}").status_code == 422
        # Their first answers to the monitor are nobody's calls.
        begun = eventually(lambda: (it := box.post("/instances/one/bench?secs=0.5")).status_code == 202 and it, 60)
        assert begun.json()["status"] == "running"
        refused = box.post("/instances/two/bench?force=true")
        assert (refused.status_code, refused.json()["code"]) == (409, "ALREADY_MEASURING")
        done = eventually(lambda: (it := box.get("/instances/one/bench").json())["status"] != "running" and it, 60)
        assert (done["status"], [step["concurrency"] for step in done["steps"]]) == ("done", list(LEVELS))
        assert all(step["failed"] == 0 and step["texts_per_sec"] > 0 for step in done["steps"])
        assert done["saturation"] in LEVELS
        assert box.get("/cache").json()["hits"] == 0
        assert box.get("/cache").json()["entries"] == 0

        again = box.post("/instances/two/bench?secs=0.5")
        assert again.status_code == 202, "what was measured a moment ago is nobody's work"
        box.delete("/instances/two")
        box.create("two")
        refused = box.post("/instances/one/bench?force=true")
        assert refused.status_code == 202 or refused.json()["code"] == "ALREADY_MEASURING", "the old one still calls"
        box.wait_ready("two")
        eventually(lambda: box.get("/instances/two/bench").json().get("code") == "NOT_MEASURED", 30)
        eventually(lambda: box.get("/instances/one/bench").json()["status"] != "running", 60)
        lines = box.cli("bench", "-i", "two", "--sweep", "--secs", "0.5", "--json").stdout.splitlines()
        assert [json.loads(line)["concurrency"] for line in lines] == list(LEVELS)
        told = box.cli("bench", "-i", "two", "--sweep", "--secs", "0.5").stdout
        assert "in flight: more of them wait longer for the same" in told
        wrong = box.cli("bench", "-i", "two", "--sweep", "--secs", "0")
        assert (wrong.returncode, "--secs must be between" in wrong.stderr) == (1, True)
        box.delete("/instances/one")
        box.create("one")
        assert box.get("/instances/one/bench").json()["code"] == "NOT_MEASURED"


@pytest.mark.processes
def test_calls_of_others_are_not_disturbed_unless_that_is_wanted(tmp_path: Path) -> None:
    with RunningAppliance(tmp_path, seeds="") as box:
        box.create("one")
        box.wait_ready("one")
        stub = box.stub()

        def is_written_down() -> bool:
            for number in range(50):
                stub.Embed(request(number), timeout=20)
            return (series.newest(box.node(), "one")["texts"] or 0) > BUSY_TEXTS

        eventually(is_written_down, 60, every=0.1)
        busy = box.post("/instances/one/bench")
        assert (busy.status_code, busy.json()["code"]) == (409, "BUSY")
        assert '"one" answered' in busy.json()["error"]
        assert box.post("/instances/one/bench?secs=0.5&force=true").status_code == 202


@pytest.mark.processes
def test_what_embeds_nothing_says_so(tmp_path: Path) -> None:
    with RunningAppliance(tmp_path, seeds="") as box:
        box.create("ranks", model_id=str(FAMILIES / "bert-rerank"))
        box.wait_ready("ranks")
        begun = box.post("/instances/ranks/bench?force=true")
        assert begun.status_code == 202
        failed = eventually(lambda: (it := box.get("/instances/ranks/bench").json())["status"] == "failed" and it, 30)
        assert "Traceback" not in failed["error"]
        assert failed["error"].startswith("appliance: ")


def request(number: int) -> mux.EmbedRequest:
    inner = tei.EmbedRequest(inputs=f"text {number}", truncate=True)
    return mux.EmbedRequest(target=mux.Target(instance_name="one"), request=inner)
