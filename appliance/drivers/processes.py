"""Processes of this machine with our marker in their environment: those that an earlier supervisord left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

from appliance.core.hanging import ProcessActivity
from appliance.files.procfs import PARENT, STARTED, SYSTEM_TIME, USER_TIME, status_fields, variable_of


def marked(variable: str, prefix: str, except_under: Collection[int | None]) -> Iterator[tuple[psutil.Process, str]]:
    """The processes whose environment has a ``variable`` that begins with ``prefix``, each with its value.

    Left out: this process, and the processes with an id in ``except_under`` and their descendants.
    """
    for pid in psutil.pids():
        try:
            if pid == os.getpid() or not bears(pid, variable, prefix) or descends(pid, except_under):
                continue
            process = psutil.Process(pid)  # it compares times of creation: an id that is used again is no parent
            value = variable_of(pid, variable) or ""
            parents = {parent.pid for parent in process.parents()}
            if value.startswith(prefix) and not {pid, *parents}.intersection(except_under):
                yield process, value
        except (psutil.Error, OSError):
            continue  # it has ended meanwhile, or is another user's and so not ours


def bears(pid: int, variable: str, prefix: str) -> bool:
    """Whether the environment of a process has a ``variable`` that begins with ``prefix``. Raises: OSError."""
    return (variable_of(pid, variable) or "").startswith(prefix)


def descends(pid: int, ancestors: Collection[int | None]) -> bool:
    """Whether it is one of these processes, or one that they or their children have started. It takes 10 us for each
    parent; of 100 replicas of one supervisord psutil would need 40 ms. Raises: OSError, when it has ended."""
    while ancestors and pid > 1 and pid not in ancestors:
        pid = int(status_fields(pid)[PARENT])
    return pid in ancestors


def resident_bytes(pid: int) -> int:
    """0 when it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def memory_available() -> int:
    """Bytes that new processes of this machine can have."""
    return int(psutil.virtual_memory().available)


class Started(NamedTuple):
    """A process as itself, and not as the next one of its number. ticks: of the kernel's clock, at its beginning."""

    pid: int
    ticks: int

    @property
    def at_ns(self) -> int:
        """When it began, since 1970, to a hundredth of a second."""
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - self.ticks / os.sysconf("SC_CLK_TCK")
        return time.time_ns() - int(age * 1e9)


def started(pid: int) -> Started | None:
    """None when it has ended."""
    try:
        return Started(pid, int(status_fields(pid)[STARTED]))
    except OSError:
        return None


def lineage(pid: int) -> list[int]:
    """This process id and those of its parents, the nearest first; empty when the process has ended."""
    try:
        process = psutil.Process(pid)
        return [process.pid, *(parent.pid for parent in process.parents())]
    except psutil.Error:
        return []


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had at once; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((line for line in file if line.startswith(b"VmHWM:")), b"VmHWM: 0 kB")
    except OSError:
        return 0
    return int(line.split()[1]) * 1024


def activity(pid: int) -> ProcessActivity:
    """Of a process with its children. Raises: OSError when it has ended."""
    pids = [pid]
    with suppress(psutil.Error):
        pids += [each.pid for each in psutil.Process(pid).children(recursive=True)]
    active, states = 0.0, set[bytes]()
    for each in pids:
        try:
            fields = status_fields(each)
            active += (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK")
            for thread in os.listdir(f"/proc/{each}/task"):
                with suppress(OSError):  # a thread may end meanwhile
                    states.add(status_fields(int(thread))[0])
                    active += waited(int(thread))
        except OSError:
            if each == pid:
                raise
    return ProcessActivity(active, stopped=states == {b"T"}, traced=b"t" in states, blocked=b"D" in states)


def waited(thread: int) -> float:
    """Seconds for which a thread was ready to run and had no core; 0 where the kernel does not count them. Raises:
    OSError when it has ended."""
    with open(f"/proc/{thread}/schedstat", "rb") as file:
        counted = file.read().split()
    return int(counted[1]) / 1e9 if len(counted) > 1 else 0.0


def kill_group(pid: int, variable: str, prefix: str) -> bool:
    """Kill a process with all of its group, which it leads. False where it has ended, or the id is another's meanwhile:
    its environment has no ``variable`` that begins with ``prefix``. Raises: OSError."""
    try:
        if not bears(pid, variable, prefix) or os.getpgid(pid) != pid:
            return False
        os.killpg(pid, signal.SIGKILL)
        return True
    except (FileNotFoundError, ProcessLookupError):
        return False


def runs(pid: int, argument: str) -> bool:
    """Whether process ``pid`` lives and has ``argument`` on its command line: the kernel may have reused the id."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and argument in process.cmdline()
    except psutil.Error:
        return False


def is_zombie(pid: int) -> bool:
    """Whether it has ended, and its parent has not asked yet how."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end(processes: list[psutil.Process], grace_secs: float) -> None:
    """Send TERM to all, wait, send KILL to the rest, and wait until they have ended."""
    for process in processes:
        send_if_alive(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=grace_secs)
    for process in alive:
        send_if_alive(process.kill)
    psutil.wait_procs(alive, timeout=5)


def send_if_alive(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.Error:
        pass  # it has gone; or it is another user's by now, whom it is not ours to end
