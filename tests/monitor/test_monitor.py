"""When the monitor looks at once, and when an answer waits for the next look."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core import health
from appliance.core.health import Look, ProbeResult, Record
from appliance.drivers.metrics import Meters
from appliance.monitor.monitor import Monitor, Outcome, ReplicaKey
from appliance.node.context import Node
from testing.specs import configured

KEY = ReplicaKey("a", 0)
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
        self.monitor.hear(KEY, health.calm(record, look), ended)
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
    watched.monitor.doubted[KEY] = 1
    assert watched.woken_by(ProbeResult.ANSWERED)
