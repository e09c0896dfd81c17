"""The process of a replica ends with its parent, and tells of its own end."""

import subprocess
import sys

import psutil
import pytest

from appliance.cluster.child import Child
from testing.running import eventually

pytestmark = pytest.mark.processes
SLEEPER = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
PARENT = f"""
import sys, time
from appliance.cluster.child import Child
child = Child({SLEEPER!r}, {{}}, on_end=print)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_its_end_is_told_with_its_status_and_its_last_lines() -> None:
    told: list[int] = []
    words = "for n in range(50): print('line', n)\nraise SystemExit(3)"
    child = Child([sys.executable, "-c", words], {}, on_end=told.append)
    eventually(lambda: told == [3])
    assert list(child.lines)[-1] == "line 49"
    assert len(child.lines) == 20


def test_one_that_is_stopped_is_no_news() -> None:
    told: list[int] = []
    child = Child(SLEEPER, {}, on_end=told.append)
    eventually(lambda: "begun" in child.lines)
    child.stop(10)
    assert child.ended.is_set()
    assert told == []


def test_one_that_does_not_heed_term_is_killed() -> None:
    words = (
        "import signal, time; signal.signal(15, lambda *a: None); print('deaf', flush=True)\nwhile True: time.sleep(1)"
    )
    child = Child([sys.executable, "-c", words], {}, on_end=lambda status: None)
    eventually(lambda: "deaf" in child.lines)
    child.stop(0.2)
    assert child.ended.wait(10)


def test_it_has_the_environment_of_its_parent_and_its_own() -> None:
    words = "import os; print(os.environ['OWN'], 'PATH' in os.environ)"
    child = Child([sys.executable, "-c", words], {"OWN": "yes"}, on_end=lambda status: None)
    assert child.ended.wait(20)
    assert list(child.lines) == ["yes True"]


def test_it_dies_with_its_parent_however_that_dies() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        eventually(lambda: "appliance.cluster.child" not in " ".join(psutil.Process(pid).cmdline()), 20)
        parent.kill()
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10)
