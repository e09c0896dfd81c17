"""Processes of this machine that carry our marker in their environment: what an earlier supervisord left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator

import psutil


def marked(variable: str, prefix: str, except_under: Collection[int | None]) -> Iterator[tuple[psutil.Process, str]]:
    """Processes whose environment has ``variable`` beginning with ``prefix``, each with its value.

    Left out: this process, and whatever is, or descends from, a process id in ``except_under``.
    """
    for process in psutil.process_iter():
        try:
            value = process.environ().get(variable, "")
            if not value.startswith(prefix) or process.pid == os.getpid():
                continue
            if not {process.pid, *(parent.pid for parent in process.parents())}.intersection(except_under):
                yield process, value
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's: then it is not ours


def lineage(pid: int) -> list[int]:
    """This process id and those of its parents, the nearest first; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process.pid, *(parent.pid for parent in process.parents())]
    except psutil.Error:
        return []


def runs(pid: int, argument: str) -> bool:
    """Whether process ``pid`` lives and has ``argument`` on its command line: a pid alone may be anybody's by now."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and argument in process.cmdline()
    except psutil.Error:
        return False


def end(processes: list[psutil.Process], grace_secs: float) -> None:
    """TERM all, wait, KILL the rest, and wait until they are gone."""
    for process in processes:
        signal(process.terminate)
    _, alive = psutil.wait_procs(processes, timeout=grace_secs)
    for process in alive:
        signal(process.kill)
    psutil.wait_procs(alive, timeout=5)


def signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        pass
