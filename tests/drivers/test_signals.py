"""A TERM that the kernel hands to a thread of grpc's ends the program as well: the main thread looks up by itself."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testing.engines import Engine
from testing.running import MINILM, RunningAppliance, eventually

TGKILL = 234  # Linux, x86-64
ARM_TGKILL = 131


def threads_of(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid}


def takes(pid: int, thread: int, number: int) -> bool:
    """Whether the thread has not blocked this signal."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    return not blocked >> (number - 1) & 1


def tell_one_thread(pid: int, number: int) -> None:
    """Send the signal to a thread of ``pid`` that is not its main thread and that stays: some begin, work and end."""
    before = threads_of(pid)
    time.sleep(1.0)
    stayed = before & threads_of(pid)
    thread = max(thread for thread in stayed if takes(pid, thread, number))
    call = TGKILL if os.uname().machine == "x86_64" else ARM_TGKILL
    assert ctypes.CDLL(None).syscall(call, pid, thread, number) == 0


@pytest.mark.processes
def test_engine_ends(tmp_path: Path) -> None:
    with Engine(tmp_path, MINILM) as engine:
        tell_one_thread(engine.process.pid, signal.SIGTERM)
        assert engine.process.wait(timeout=5) == 0


def test_multiplexer_ends_and_is_started_again(own_appliance: RunningAppliance) -> None:
    (process,) = own_appliance.processes_of("multiplexer")
    tell_one_thread(process.pid, signal.SIGTERM)
    eventually(lambda: not process.is_running(), timeout=5)
    eventually(lambda: own_appliance.processes_of("multiplexer"), timeout=5)


TICKS = """
import itertools, os, signal, sys, time
from appliance.drivers.signals import ShutdownSignals
shutdown, began, count = ShutdownSignals(), time.monotonic(), itertools.count(1)
def tick():
    print(time.monotonic() - began)
    if next(count) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return sys.argv[1] == "busy"
shutdown.wait(tick, lambda: None)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("what", "least_secs"), [("busy", 5 * 0.2), ("idle", 0.2 + 0.4 + 0.8 + 1.0 + 1.0)])
def test_the_main_thread_looks_up_less_often_while_there_is_nothing_to_do(what: str, least_secs: float) -> None:
    told = subprocess.run([sys.executable, "-c", TICKS, what], stdout=subprocess.PIPE, text=True, check=True)
    ticks = [float(line) for line in told.stdout.split()]
    assert len(ticks) == 5
    assert ticks[-1] > least_secs
