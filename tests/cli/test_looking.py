"""`appliance logs`, `events` and `gpus`: the last of it, and with -f what comes."""

import argparse
import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.cli.looking import event_line, gpu_row, say_lines
from testing.engines import FAMILIES
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    with RunningAppliance(tmp_path_factory.mktemp("looking"), seeds="") as running:
        running.create("one", model_id=str(FAMILIES / "bert-cls"))
        running.wait_ready("one")
        yield running


@contextmanager
def following(node: RunningAppliance, *arguments: str) -> Iterator[queue.Queue[str]]:
    """The lines that a command prints as they come, until the block ends it."""
    command = subprocess.Popen(node.command(*arguments, "-f"), env=node.environ, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    assert command.stdout
    reader = threading.Thread(target=lambda: [lines.put(line) for line in command.stdout or ()])
    reader.start()
    try:
        yield lines
    finally:
        command.terminate()
        command.wait()
        reader.join()
        command.stdout.close()


def test_the_last_lines_of_a_log(node: RunningAppliance) -> None:
    done = node.cli("logs", "one", "--lines", "1")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "Ready after" in done.stdout
    assert json.loads(node.cli("logs", "one", "--lines", "1", "--json").stdout) == done.stdout.splitlines()
    assert node.cli("logs", "one", "--lines", "0").stdout == ""
    unknown = node.cli("logs", "none")
    assert (unknown.returncode, "not found" in unknown.stderr) == (1, True)


def test_followed_logs_and_events_say_what_comes(node: RunningAppliance) -> None:
    with following(node, "logs", "one", "--lines", "1") as lines, following(node, "events", "--lines", "1") as told:
        lines.get(timeout=30)  # what was there: from here on both follow
        told.get(timeout=30)
        eventually(lambda: node.post("/instances/one/restart").status_code == 200)
        seen = [lines.get(timeout=30)]
        while "Ready after" not in seen[-1]:
            seen.append(lines.get(timeout=30))
        assert "restarted" in told.get(timeout=30)


def test_the_last_events(node: RunningAppliance) -> None:
    assert "is not a number from 0 on" in node.cli("events", "--lines", "-1").stderr
    with open("/dev/full", "wb") as full:
        done = subprocess.run(node.command("events"), env=node.environ, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"appliance: [Errno 28] No space left on device\n")
    lines = node.cli("events", "--lines", "1000").stdout.splitlines()
    assert any('Instance "one" created' in line for line in lines)
    (last,) = node.cli("events", "--lines", "1", "--json").stdout.splitlines()
    assert json.loads(last)["seq"] >= len(lines) > 1


def test_a_box_without_gpus_says_so(node: RunningAppliance) -> None:
    if node.get("/gpus").json():
        pytest.skip("this box has GPUs")
    assert "Models run on the CPU" in node.cli("gpus").stdout
    assert json.loads(node.cli("gpus", "--json").stdout) == []


def test_a_gpu_and_an_event_in_one_line() -> None:
    gpu = {"index": 0, "name": "H100", "memory_used": 2_000_000_000, "memory_total": 80_000_000_000, "utilization": 0.5}
    row = gpu_row({**gpu, "replicas": [{"instance": "a", "replica": 1}]})
    assert row == {"index": 0, "name": "H100", "used": "2.0 GB", "total": "80.0 GB", "busy": "50%", "replicas": "a-1"}
    line = event_line({"time": "2026-01-01T00:00:00.000Z", "event": "died", "message": "it ended\nwith a log"})
    assert line.endswith("died             it ended")


class Log:
    """A log as control shows it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log_window(self, name: str, replica: int, start: int) -> dict[str, Any]:
        return {"lines": self.lines[start:], "total_lines": len(self.lines)}


def test_a_log_that_was_rotated_meanwhile_is_not_printed_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it was printed once more whenever its oldest part was rotated away."""
    log, arguments = Log(), argparse.Namespace(name="a", replica=0, json=False, follow=True)
    log.lines = [str(number) for number in range(10)]
    known = say_lines(arguments, log, 8)  # type: ignore[arg-type]
    del log.lines[:6]
    known = say_lines(arguments, log, known)  # type: ignore[arg-type]
    log.lines.append("new")
    assert say_lines(arguments, log, known) == 5  # type: ignore[arg-type]
    assert capsys.readouterr().out.split() == ["8", "9", "new"]
