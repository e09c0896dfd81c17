"""Leases of cores: one at a time, given back by death, and never waited for without end."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.drivers import cores
from appliance.drivers.cores import AllCores, Core
from testing.running import eventually

pytestmark = pytest.mark.processes


def hold(path: Path, told: Any) -> None:
    """A process that has the core until it is killed."""
    with Core(path).lease() as held:
        told.send(held)
        time.sleep(600)


@pytest.mark.parametrize("fails", [1, 2])
def test_without_another_thread_it_is_computed_without_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The text was never answered, and no other one either."""
    started, left = threading.Thread.start, [None] * fails

    def start(thread: threading.Thread) -> None:
        if thread.name == "core" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    core = Core(tmp_path / "core", patience_secs=20)
    with other_process(core.path):
        for _ in range(fails):
            began = time.monotonic()
            with core.lease() as held:
                assert not held
            assert time.monotonic() - began < 10
    with core.lease() as held:
        assert held


@contextmanager
def other_process(path: Path) -> Iterator[int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(path, theirs), daemon=True)
    process.start()
    assert ours.recv() is True
    assert process.pid
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def test_a_core_is_leased_to_one_at_a_time(tmp_path: Path) -> None:
    path, inside, most, done = tmp_path / "locks" / "core-0.lock", [0], [0], []

    def compute() -> None:
        core = Core(path)
        for _ in range(50):
            with core.lease() as held:
                assert held
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1
        done.append(True)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (len(done), most) == (4, [1])


def test_two_engines_take_turns(tmp_path: Path) -> None:
    """One that never pauses must not keep the other from the core."""
    path, taken = tmp_path / "core.lock", []
    stop = threading.Event()

    def compute(name: str) -> None:
        core = Core(path)
        while not stop.is_set():
            with core.lease() as held:
                assert held
                taken.append(name)
                time.sleep(0.002)

    threads = [threading.Thread(target=compute, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    eventually(lambda: len(taken) > 200)
    stop.set()
    for thread in threads:
        thread.join(timeout=10)
    assert min(taken.count("a"), taken.count("b")) > len(taken) / 4


def test_the_kernel_gives_the_core_of_a_dead_process_back(tmp_path: Path) -> None:
    path = tmp_path / "core.lock"
    with other_process(path) as pid:
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with Core(path).lease() as held:
            assert held


def test_what_a_frozen_process_holds_is_not_waited_for_and_used_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "PATIENCE_SECS", 0.3)
    path = tmp_path / "core.lock"
    core = Core(path)
    with other_process(path) as pid:
        os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            with core.lease() as held:
                assert not held
    eventually(lambda: not core.pending)  # it came when nobody waited any more, and was given back
    with Core(path).lease() as held, core.lease() as second:
        assert (held, second) == (True, False)
    with core.lease() as held:
        assert held


def test_all_cores_are_had_together_or_not_at_all(tmp_path: Path) -> None:
    paths = [tmp_path / f"core-{number}.lock" for number in range(3)]
    mine, ours, theirs = Core(paths[1]), AllCores(paths), AllCores(paths)
    with ours.lease_now() as all_of_them:
        assert all_of_them
        for other in (ours, theirs):  # of a thread of this process, and of another process
            with other.lease_now() as again:
                assert not again
    with mine.lease() as held, theirs.lease_now() as all_of_them, ours.lease_now(besides=mine) as the_others:
        # It gave back what it had of them, without waiting for the one that is taken.
        assert (held, all_of_them, the_others) == (True, False, False)
    with mine.lease(), ours.lease_now(besides=mine) as the_others:
        assert the_others
