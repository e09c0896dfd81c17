"""When the monitor looks at once, at everything, or only at what its probes have told."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core import health
from appliance.core.health import Look, ProbeResult, Record
from appliance.core.layout import replica_process
from appliance.core.problems import Kind, Problem
from appliance.core.program import MARKER
from appliance.core.state import State
from appliance.core.status import Process
from appliance.drivers.metrics import Meters
from appliance.drivers.supervisord import Supervisor
from appliance.monitor.monitor import CALM_SECS, CHECK_SECS, Doubt, Monitor
from appliance.monitor.probing import Outcome, ReplicaKey, RunningProbe
from appliance.node.context import Node
from testing.relay import instance
from testing.specs import configured

KEY, DOUBT = ReplicaKey("a", 0), Doubt("a", 1, 0)
WELL, LOOK = Record(1, pid=7, ready=True), Look(1, "RUNNING", pid=7, listening=True)


class Watched:
    """A monitor, and how often it wants to look at once."""

    def __init__(self, folder: Path, meters: Meters) -> None:
        self.woken = 0
        self.monitor = Monitor(Node.at(configured(data_dir=str(folder))), meters, self.wake)

    def wake(self) -> None:
        self.woken += 1

    def woken_by(self, result: ProbeResult | Exception, record: Record = WELL, look: Look = LOOK) -> bool:
        ended: Future[Outcome] = Future()
        if isinstance(result, Exception):
            ended.set_exception(result)
        else:
            ended.set_result(Outcome(result, "", compared=False, at=0.0))
        before = self.woken
        self.monitor.hear(DOUBT, health.calm(record, look), ended)
        return self.woken > before


@pytest.fixture
def watched(tmp_path: Path, meters: Meters) -> Watched:
    return Watched(tmp_path, meters)


def test_an_answer_of_a_replica_that_is_well_waits_for_the_next_look(watched: Watched) -> None:
    assert not watched.woken_by(ProbeResult.ANSWERED)


def test_what_is_new_is_looked_at_at_once(watched: Watched) -> None:
    for result in (ProbeResult.MISSED, ProbeResult.WRONG, ProbeResult.BUSY, RuntimeError("of the probe itself")):
        assert watched.woken_by(result)
    assert watched.woken_by(ProbeResult.ANSWERED, replace(WELL, ready=False)), "its first answer makes it ready"
    assert watched.woken_by(ProbeResult.ANSWERED, replace(WELL, misses=1)), "it answers again"
    assert watched.woken_by(ProbeResult.ANSWERED, WELL, replace(LOOK, ejected=True)), "it gets traffic again"


def test_a_doubt_that_came_during_the_probe_is_looked_at_at_once(watched: Watched) -> None:
    watched.monitor.doubted.add(DOUBT)
    assert watched.woken_by(ProbeResult.ANSWERED)


class OneReplica(Supervisor):
    """A supervisord that runs replica 0 of `a`, and counts how often it is asked for everything."""

    def __init__(self, pid: int) -> None:
        super().__init__("no socket")
        self.pid_of_it, self.asked, self.state, self.fails = pid, 0, "RUNNING", False

    def processes(self) -> list[Process]:
        self.asked += 1
        if self.fails:
            raise Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", "supervisord does not answer")
        return [Process("a", replica_process("a", 0), self.state, self.pid_of_it, started=1.0)]


class Running:
    """A monitor of one replica, which is well and not due to be probed."""

    def __init__(self, folder: Path, meters: Meters, pid: int) -> None:
        self.supervisor = OneReplica(pid)
        self.node = replace(Node.at(configured(data_dir=str(folder))), supervisor=self.supervisor)
        self.node.state.update(lambda state: replace(state, instances={"a": instance("a", 9001)}))
        self.monitor = Monitor(self.node, meters, lambda: None)
        self.monitor.records[KEY] = Record(1, pid=pid, ready=True, probe_at=float("inf"))

    def asks(self, woken: bool) -> bool:
        before = self.supervisor.asked
        self.monitor.tick(woken)
        return self.supervisor.asked > before


@pytest.fixture
def running(tmp_path: Path, meters: Meters) -> Iterator[Running]:
    node = Node.at(configured(data_dir=str(tmp_path)))
    marked = {**os.environ, MARKER: node.marker(instance("a", 9001), 0)}
    with subprocess.Popen(["sleep", "600"], env=marked) as process:
        yield Running(tmp_path, meters, process.pid)
        process.kill()


def test_while_all_is_well_supervisord_is_asked_only_when_something_happens(running: Running) -> None:
    assert running.asks(woken=False), "nothing was seen so far"
    assert not running.asks(woken=False)
    assert running.asks(woken=True)
    assert not running.asks(woken=False)
    running.monitor.looked_at -= CALM_SECS
    assert running.asks(woken=False), "an event may have been lost"
    assert not running.asks(woken=False)
    running.node.state.update(lambda state: replace(state, instances={**state.instances, "b": instance("b", 9002)}))
    assert running.asks(woken=False), "another instance is wanted"
    assert running.asks(woken=False), "and is not ready"
    running.node.state.update(lambda state: State(generation=state.generation, instances={"a": state.instances["a"]}))
    assert running.asks(woken=False)
    assert not running.asks(woken=False)


def test_one_that_ended_a_moment_ago_is_not_said_to_have_no_program(running: Running) -> None:
    running.monitor.tick()
    running.supervisor.pid_of_it = 2**22  # there is none: supervisord has not noticed yet, or starts the next one
    running.monitor.tick()
    (told,) = [each for each in running.node.journal.since(0) if each["event"] == "died"]
    assert told["message"].startswith('Replica 0 of "a" ended, and supervisor did not know how yet')


def test_a_process_that_ended_without_an_event_is_missed_all_the_same(running: Running) -> None:
    running.asks(woken=False)
    written = running.node.health.path
    written.unlink()
    running.monitor.checked_at -= CHECK_SECS
    assert not running.asks(woken=False), "its process is there"
    assert written.exists(), "control takes a monitor that writes nothing for one that hangs"
    os.kill(running.supervisor.pid_of_it, signal.SIGKILL)
    os.waitid(os.P_PID, running.supervisor.pid_of_it, os.WEXITED | os.WNOWAIT)  # supervisord may not have waited for it
    assert not running.asks(woken=False)
    running.monitor.checked_at -= CHECK_SECS
    assert running.asks(woken=False)


def test_what_is_not_well_is_looked_at_each_time(running: Running) -> None:
    running.monitor.records[KEY] = replace(running.monitor.records[KEY], misses=1)
    assert [running.asks(woken=False) for _ in range(3)] == [True] * 3


def test_a_doubt_is_no_calm(running: Running) -> None:
    running.asks(woken=False)
    running.monitor.doubt("a", 0, 1)
    assert running.asks(woken=True)
    assert running.monitor.records[KEY].golden_at == float("-inf")


def test_what_a_probe_has_told_is_taken_without_a_look_at_everything(running: Running) -> None:
    running.asks(woken=False)
    monitor = running.monitor
    told: Future[Outcome] = Future()
    told.set_result(Outcome(ProbeResult.ANSWERED, "", compared=True, at=1e9))
    pid = running.supervisor.pid_of_it
    monitor.probing.probes[KEY] = RunningProbe(pid, told)
    assert not running.asks(woken=False)
    assert not monitor.probing.is_running(KEY)
    interval_secs = running.node.settings.health_check_interval_secs
    assert monitor.records[KEY].probe_at == 1e9 + interval_secs
    assert monitor.records[KEY].golden_at == 1e9 + health.GOLDEN_SECS
    assert monitor.probing.checked_at[KEY]


def test_a_look_that_fails_keeps_no_probe_from_beginning(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(running.monitor.probing, "begin_round", lambda: rounds.append(1))
    running.supervisor.fails = True
    with pytest.raises(Problem):
        running.monitor.tick(woken=True)
    assert rounds == [1]


def test_news_of_a_look_that_failed_is_looked_at_again(running: Running) -> None:
    running.asks(woken=False)
    answers, running.supervisor.fails = running.supervisor.asked, True
    with pytest.raises(Problem):
        running.monitor.tick(woken=True)
    running.supervisor.fails = False
    assert running.asks(woken=False)
    assert running.supervisor.asked == answers + 2


def test_a_doubt_about_nobody_is_forgotten(running: Running) -> None:
    running.monitor.doubt("gone", 0, 1)
    assert running.asks(woken=True)
    assert not running.asks(woken=False)


def test_a_replica_that_is_at_rest_is_no_reason_to_look() -> None:
    at_rest = Record(1)
    assert health.settled(at_rest, Look(1, "STOPPED"))
    assert health.settled(at_rest, Look(1, "FATAL", quarantined=True))
    assert not health.settled(at_rest, Look(1, "RUNNING", pid=7, quarantined=True)), "it has to be stopped"
    assert not health.settled(Record(1, pid=7), Look(1, "STOPPED")), "that an operator did it was not journalled yet"
    assert not health.settled(at_rest, Look(1, "STARTING", pid=7))
    assert not health.settled(at_rest, Look(1, "BACKOFF"))
    assert not health.settled(at_rest, Look(1, "ABSENT"))


def test_that_a_replacement_answers_is_written_down_as_soon_as_there_is_room(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a replica that fails weeks later would bring the spec of before back."""
    node, update = running.node, running.node.state.update
    node.state.update(lambda state: replace(state, instances={"a": replace(state.get("a"), unproved=True)}))

    def refuse(_: object) -> None:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", "No space left on device")

    monkeypatch.setattr(node.state, "update", refuse)
    running.monitor.tick()
    assert node.state.read().get("a").unproved
    monkeypatch.setattr(node.state, "update", update)
    running.monitor.tick()
    assert not node.state.read().get("a").unproved
