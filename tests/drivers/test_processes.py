"""Left-over processes: found by their marker, not by anything else, and ended for certain."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest

from appliance.drivers import processes
from testing.running import eventually

pytestmark = pytest.mark.processes

VARIABLE = "TEI_APPLIANCE_TEST_MARKER"
CHILD = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + CHILD
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@contextlib.contextmanager
def running(code: str, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process with the marker that has said "up" (or whose child has)."""
    environ = {**os.environ, VARIABLE: marker}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def node() -> str:
    return uuid4().hex


def leftovers(prefix: str, *except_under: int | None) -> dict[int, str]:
    return {process.pid: value for process, value in processes.marked(VARIABLE, prefix, except_under)}


def test_a_process_with_the_marker_is_found_with_its_value(node: str) -> None:
    with running(CHILD, f"{node}:a:0:1") as process:
        assert leftovers(f"{node}:") == leftovers(f"{node}:a:") == {process.pid: f"{node}:a:0:1"}
        assert leftovers(f"{node}:ab:") == leftovers("another:") == {}


def test_children_inherit_the_marker_and_are_found_too(node: str) -> None:
    with running(PARENT, f"{node}:a:0:1") as process:
        children = {child.pid for child in psutil.Process(process.pid).children()}
        assert len(children) == 1
        assert set(leftovers(f"{node}:")) == {process.pid, *children}


def test_what_a_known_process_started_is_not_left_over(node: str) -> None:
    with running(PARENT, f"{node}:a:0:1") as supervised, running(CHILD, f"{node}:a:0:1") as left:
        assert set(leftovers(f"{node}:", supervised.pid, None)) == {left.pid}
        assert leftovers(f"{node}:", os.getpid()) == {}


def test_this_process_is_never_found(node: str) -> None:
    """Only what stood in the environment at exec counts, so the caller is started with the marker."""
    code = f"from appliance.drivers import processes; print(*processes.marked({VARIABLE!r}, {node!r}, ()))"
    environ = {**os.environ, VARIABLE: f"{node}:control:0:0"}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""


def test_end_ends_what_listens_to_term_at_once(node: str) -> None:
    with running(CHILD, f"{node}:a:0:1") as process:
        began = time.monotonic()
        processes.end([psutil.Process(process.pid)], 10)
        assert time.monotonic() - began < 3
        assert not psutil.pid_exists(process.pid)


def test_end_ends_what_ignores_term(node: str) -> None:
    with running(DEAF, f"{node}:a:0:1") as deaf, running(CHILD, f"{node}:b:0:1") as hearing:
        began = time.monotonic()
        processes.end([psutil.Process(deaf.pid), psutil.Process(hearing.pid)], 0.3)
        assert 0.3 <= time.monotonic() - began < 3
        assert leftovers(f"{node}:") == {}


def test_ending_what_is_gone_or_nothing_is_done_at_once(node: str) -> None:
    with running(CHILD, f"{node}:a:0:1") as process:
        gone = psutil.Process(process.pid)
        process.kill()
        process.wait()
    processes.end([gone], 10)
    processes.end([], 10)


BUSY = "print('up', flush=True)\nwhile True: pass"


def test_what_a_process_did_counts_with_its_children(node: str) -> None:
    with running(CHILD, f"{node}:a:0:1") as idle, running(BUSY, f"{node}:b:0:1") as busy:
        before = [processes.activity(each.pid).active_secs for each in (idle, busy)]
        mine = processes.activity(os.getpid()).active_secs
        time.sleep(1)
        after = [processes.activity(each.pid).active_secs for each in (idle, busy)]
        assert after[0] - before[0] < 0.1
        assert after[1] - before[1] > 0.5  # also where others have the cores: it waits for one
        assert processes.activity(os.getpid()).active_secs - mine > 0.5
    with pytest.raises(OSError):
        processes.activity(idle.pid)


def test_a_process_is_stopped_when_all_of_it_is(node: str) -> None:
    with running(PARENT, f"{node}:a:0:1") as process:
        assert not processes.activity(process.pid).stopped
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        assert not processes.activity(process.pid).stopped  # its child goes on
        os.killpg(process.pid, signal.SIGSTOP)
        eventually(lambda: processes.activity(process.pid).stopped)


def test_a_group_is_killed_as_a_whole_and_only_one_of_ours(node: str) -> None:
    with running(PARENT, f"{node}:a:0:1") as process:
        (child,) = psutil.Process(process.pid).children()
        assert not processes.kill_group(process.pid, VARIABLE, "another:")
        assert not processes.kill_group(child.pid, VARIABLE, f"{node}:")  # it leads no group
        assert processes.kill_group(process.pid, VARIABLE, f"{node}:")
        assert process.wait(5) == -signal.SIGKILL
        assert not processes.kill_group(process.pid, VARIABLE, f"{node}:")
        eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
