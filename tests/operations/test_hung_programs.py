"""Programs of ours that look alive and are not."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import requests

from appliance.core.events import Event
from appliance.core.hanging import ProcessActivity
from appliance.core.status import Process
from appliance.drivers import processes
from appliance.files.heartbeat import BEAT, last_beat
from appliance.operations.hung_programs import LOOK_SECS, MONITOR, ProgramWatch, WatchedProgram, serving
from testing.agreement import supervised
from testing.running import RunningAppliance, eventually

GATEWAY = WatchedProgram("gateway", "gateway")


def processes_of(running: RunningAppliance, name: str) -> list[psutil.Process]:
    pid = next(each["pid"] for each in supervised(running) if each["name"] == name)
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def suspend(running: RunningAppliance, names: list[str]) -> list[psutil.Process]:
    """A worker may have been begun after its parent was looked at, and would have a heartbeat for it."""
    suspended: list[psutil.Process] = []
    while more := [each for name in names for each in processes_of(running, name) if each not in suspended]:
        for process in more:
            process.suspend()
        suspended += more
    return suspended


def have_ended(suspended: list[psutil.Process]) -> bool:
    left = [each for each in suspended if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not left, [(each.pid, each.ppid(), os.getpgid(each.pid), each.status(), each.cmdline()) for each in left]
    return True


def answers(running: RunningAppliance) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1)
    ports = (running.http_port, running.api_port)
    return all(requests.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code for port in ports)


def test_programs_that_stand_still_are_replaced(own_appliance: RunningAppliance) -> None:
    """Those that serve others all at once; then the monitor, which has seen to it."""
    running = own_appliance
    programs = ("multiplexer-0", "gateway", "control", "monitor")
    eventually(lambda: all(last_beat(running.folder / f"{each}.beat") for each in programs), 20)
    for names in (["multiplexer-0", "gateway", "control"], ["monitor"]):
        suspended = suspend(running, names)
        began = time.monotonic()
        try:
            eventually(lambda suspended=suspended: have_ended(suspended), 60)
        finally:
            for process in suspended:
                if process.is_running():
                    process.resume()
        print(f"{', '.join(names)}: killed after {time.monotonic() - began:.1f} s")
        eventually(lambda: answers(running), 30)
        told = {each["program"]: each for each in running.get("/events").json() if each["event"] == Event.PROGRAM_HUNG}
        assert set(names) <= set(told)
        assert all("was stopped by a signal" in each["message"] for each in told.values())
    assert len(told) == 4


class Watched:
    """A watch over one program whose process, activity and heartbeat are as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process: Process | None = Process("gateway", "gateway", "RUNNING", pid=77)
        self.activity = ProcessActivity(1.0)
        self.now = time.monotonic()
        self.answer_secs: Iterator[float] = iter(())  # that supervisord takes for each answer
        self.killed: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.beat_file = folder / "gateway.beat"
        node: Any = SimpleNamespace(
            id="node",
            layout=SimpleNamespace(heartbeat=lambda name: str(folder / f"{name}.beat")),
            supervisor=SimpleNamespace(process=self.ask_supervisord),
            journal=SimpleNamespace(record=self.record),
        )
        monkeypatch.setattr(processes, "activity", lambda pid: self.activity)
        monkeypatch.setattr(processes, "kill_group", self.kill)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = ProgramWatch(node, "monitor", [GATEWAY])
        self.beat()

    def ask_supervisord(self, group: str, name: str) -> Process | None:
        self.now += next(self.answer_secs, 0.0)
        return self.process

    def record(self, event: Event, instance: str | None, message: str, **details: Any) -> None:
        self.told.append({"event": event, "instance": instance, "message": message, **details})

    def kill(self, pid: int, variable: str, prefix: str) -> bool:
        self.killed.append(pid)
        return True

    def beat(self) -> None:
        self.beat_file.write_bytes(BEAT.pack(77, self.now))

    def look(self, times: int = 1, beats: bool = False) -> None:
        """beats: it had a heartbeat a moment ago."""
        for _ in range(times):
            self.now += LOOK_SECS
            if beats:
                self.beat()
            self.watch.look(GATEWAY)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_program_without_a_heartbeat_is_killed_once_and_told(watched: Watched) -> None:
    watched.look(3)
    assert watched.killed == []
    watched.look()
    assert watched.killed == [77]
    assert watched.told == [
        {
            "event": Event.PROGRAM_HUNG,
            "instance": None,
            "message": "gateway (process 77) has had no heartbeat for 20 s and did nothing: it was killed, and "
            "supervisord starts it again",
            "program": "gateway",
        }
    ]
    watched.look(2)  # supervisord has not noticed yet
    assert watched.killed == [77]


def test_a_supervisord_that_answers_slowly_does_not_hide_it(watched: Watched) -> None:
    watched.answer_secs = iter((0.0, 0.7, 1.4, 2.1))
    watched.look(4)
    assert watched.killed == [77]


def test_a_heartbeat_begins_anew(watched: Watched) -> None:
    for _ in range(5):
        watched.look(3)
        watched.look(beats=True)
    assert watched.killed == []


def test_one_that_is_starved_of_cores_is_left_alone(watched: Watched) -> None:
    for second in range(40):
        watched.activity = ProcessActivity(1.0 + second)
        watched.look()
    assert watched.killed == []


@pytest.mark.parametrize("state", ["STOPPING", "EXITED", "BACKOFF", None])
def test_what_ends_is_left_to_supervisord(watched: Watched, state: str | None) -> None:
    watched.process = Process("gateway", "gateway", state, pid=77) if state else None
    watched.look(20)
    assert watched.killed == []


def test_one_that_never_had_a_heartbeat_is_left_alone(watched: Watched) -> None:
    """On a disk that nobody can write to."""
    watched.beat_file.unlink()
    watched.look(20)
    assert watched.killed == []


def test_one_that_starts_is_not_taken_for_the_one_before(watched: Watched) -> None:
    watched.look(3)
    watched.process = Process("gateway", "gateway", "STARTING", pid=78)
    watched.look(20)
    assert watched.killed == []


def test_a_heartbeat_between_two_looks_counts(watched: Watched) -> None:
    watched.look()
    for _ in range(10):
        watched.now += LOOK_SECS + 0.005
        watched.watch.look(GATEWAY)
        watched.beat()
    assert watched.killed == []


class Over(Exception):
    """Of the test."""


def test_where_the_disk_takes_no_heartbeat_nobody_is_judged(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps, own, really = iter(range(40)), threading.get_ident(), time.sleep

    def sleep(secs: float) -> None:
        if threading.get_ident() != own:  # of an earlier test
            really(secs)
            return
        watched.now += secs
        if next(sleeps, None) is None:
            raise Over

    monkeypatch.setattr(time, "sleep", sleep)
    watched.watch.trial.path = tmp_path / "no folder" / "beat"
    with pytest.raises(Over):
        watched.watch.run()
    assert watched.killed == []
    (tmp_path / "no folder").mkdir()
    sleeps = iter(range(40))
    with pytest.raises(Over):
        watched.watch.run()
    assert watched.killed


def test_all_programs_that_serve_are_watched_and_the_monitor_is_patient() -> None:
    assert [each.process for each in serving(2)] == ["control", "gateway", "multiplexer-0", "multiplexer-1"]
    assert MONITOR.patience_secs > GATEWAY.patience_secs
