"""`appliance up` at its edges: nobody reads what it says, no terminal is left, an address that no machine here has."""

import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from appliance.cli.up import supervisord_environment
from testing.running import RunningAppliance, eventually

pytestmark = pytest.mark.processes


def test_nobody_reading_ends_nothing_and_orphans_nothing(tmp_path: Path) -> None:
    """`appliance up | head -1`: it broke off then, and left everything running without it."""
    running = RunningAppliance(tmp_path, seeds="")
    up = subprocess.Popen(running.command("up"), env=running.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert up.stdout
        assert b"is starting" in up.stdout.readline()
        up.stdout.close()
        eventually(lambda: running.get("/ready").status_code == 200)
        assert up.poll() is None
    finally:
        up.terminate()
    status = up.wait(timeout=30)
    assert up.stderr
    with up.stderr:
        assert (status, up.stderr.read()) == (0, b"")
    assert not running.left_over()


@pytest.mark.parametrize("bind", ["nonsense", "203.0.113.7", "127.0.0.1:9000", "fe80::1%none"])
def test_an_address_of_another_machine_is_refused_by_its_name(tmp_path: Path, bind: str) -> None:
    running = RunningAppliance(tmp_path, seeds="", settings=f'bind = "{bind}"')
    done = subprocess.run(running.command("up"), env=running.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f'bind = "{bind}" is no address of this machine' in done.stderr
    assert not running.left_over()


def test_without_instances_our_programs_take_less_than_250_mb(tmp_path: Path) -> None:
    """Proportional: what processes share counts once. The one that waits in the foreground takes next to nothing."""
    with RunningAppliance(tmp_path, seeds="") as running:
        eventually(lambda: running.get("/ready").status_code == 200)
        assert running.process
        up = psutil.Process(running.process.pid)
        eventually(lambda: "standby.py" in " ".join(up.cmdline()))
        sizes = {" ".join(each.cmdline()[1:4]): megabytes(each) for each in (up, *up.children(recursive=True))}
        assert len(sizes) >= 5
        assert sum(megabytes(each) for each in (up, *up.children(recursive=True))) < 250, sizes
        assert megabytes(up) < 12, sizes


def megabytes(process: psutil.Process) -> float:
    return process.memory_full_info().pss / 2**20


def test_hup_ends_nothing_and_a_broken_configuration_does_not_hinder_the_end(tmp_path: Path) -> None:
    running = RunningAppliance(tmp_path, seeds="")
    up = subprocess.Popen(
        running.command("up"),
        env=running.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        eventually(lambda: running.get("/ready").status_code == 200)
        up.send_signal(signal.SIGHUP)
        eventually(lambda: "standby.py" in " ".join(psutil.Process(up.pid).cmdline()))
        up.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert up.poll() is None
        assert running.get("/ready").status_code == 200
        kept = running.config.read_text()
        running.config.write_text("this is no TOML")
    finally:
        up.terminate()
    told, errors = up.communicate(timeout=40)
    assert up.returncode == 0
    assert told.endswith(b"\nStopped; no process is left\n")
    assert b"Warning" not in errors
    running.config.write_text(kept)
    assert not running.left_over()


def test_a_signal_while_all_becomes_ready_is_never_lost(tmp_path: Path) -> None:
    """Python's handlers ran in whatever program `up` was just then: a thread of gRPC took a Ctrl-C that came in the
    moment before `standby`, and nothing ended. So no thread may take one once signals wait."""
    with RunningAppliance(tmp_path) as running:
        assert running.process
        running.stop()
        sampled = 0
        running.process = subprocess.Popen(running.command("up"), env=running.environ)
        deadline = time.monotonic() + 60
        while "standby.py" not in (command := b" ".join(arguments(running.process.pid)).decode()):
            assert time.monotonic() < deadline, command
            main, *others = threads_that_take(signal.SIGINT, running.process.pid)
            if not main:
                sampled += len(others)
                assert not any(others)
        assert sampled > 0


def arguments(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def threads_that_take(number: int, pid: int) -> list[bool]:
    """Whether each thread of a process has the signal unblocked; the main thread first."""
    taking = []
    for task in sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
        try:
            status = Path(f"/proc/{pid}/task/{task}/status").read_text()
        except OSError:
            continue  # it has just ended
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        taking.append(not blocked & 1 << number - 1)
    return taking


def test_a_closed_terminal_ends_everything(tmp_path: Path) -> None:
    running = RunningAppliance(tmp_path, seeds="")
    pid, terminal = pty.fork()
    if not pid:
        os.execve(running.command("up")[0], running.command("up"), running.environ)
    try:
        eventually(lambda: running.get("/ready").status_code == 200)
        eventually(lambda: "standby.py" in " ".join(psutil.Process(pid).cmdline()))
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not [(each.pid, each.ppid(), each.cmdline()) for each in running.left_over()]


def test_tei_is_told_to_write_no_line_for_each_request_unless_its_operator_says_otherwise(tmp_path: Path) -> None:
    """supervisord reads every line: 12 to 60 us of CPU each. Starts, warnings and errors stay."""
    node = RunningAppliance(tmp_path, seeds="").node()
    quiet = supervisord_environment(node, {})["LOG_LEVEL"]
    assert quiet.split(",") == ["info", *(f"text_embeddings_router::{each}::server=warn" for each in ("grpc", "http"))]
    assert supervisord_environment(node, {"LOG_LEVEL": "debug"})["LOG_LEVEL"] == "debug"
