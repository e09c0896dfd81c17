"""The machine under the appliance refuses: disk full, read-only, no file descriptors. It says so, and goes on."""

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance.monitor.machine import EXAMINE_SECS
from testing.running import TINY, RunningAppliance, eventually
from tests.faults.test_kills import embeds

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root"),
]
SEED = f'[[instances]]\nname = "kept"\nmodel_id = "{TINY}"\n'


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningAppliance]:
    """An appliance whose data folder is a disk of 40 MB, and its state another."""
    disks = (tmp_path / "data", tmp_path / "state")
    for disk in disks:
        disk.mkdir()
        mount("-t", "tmpfs", "-o", "size=40m", "small", str(disk))
    settings = f'health_check_interval_secs = 1\nstate_file = "{tmp_path}/state/state.toml"'
    try:
        with RunningAppliance(tmp_path, seeds=SEED, settings=settings) as running:
            running.wait_ready("kept")
            eventually(lambda: health(running)["status"] == "healthy" and "kept:kept-0" in pids(running))
            yield running
    finally:
        for disk in disks:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def health(running: RunningAppliance) -> dict[str, Any]:
    found: dict[str, Any] = running.get("/health").json()
    return found


def events(running: RunningAppliance, name: str) -> list[dict[str, Any]]:
    return [entry for entry in running.get("/events").json() if entry["event"] == name]


def pids(running: RunningAppliance) -> dict[str, str]:
    """Program -> pid, of everything that supervisor runs."""
    lines = [line.split() for line in running.supervisorctl("status").splitlines()]
    return {line[0]: line[3].rstrip(",") for line in lines if line[1] == "RUNNING"}


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def refused(running: RunningAppliance) -> None:
    """A change is refused with 507 and changes nothing; everything else goes on in the same processes."""
    answer = running.post("/instances", {"name": "late", "model_id": TINY})
    assert (answer.status_code, answer.json()["code"]) == (507, "STATE_WRITE_FAILED"), answer.text
    assert [entry["name"] for entry in running.get("/instances").json()] == ["kept"]
    assert embeds(running, "kept")
    assert running.get("/metrics").status_code == 200


def test_a_full_disk_has_a_name_and_nothing_dies(small: RunningAppliance) -> None:
    before = pids(small)
    fillers = [small.folder / "filler", small.folder.parent / "state" / "filler"]
    for filler in fillers:
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
    told = eventually(lambda: health(small) if "disk_full" in health(small).get("reason", "") else None)
    assert told["status"] == "degraded"
    for _ in range(5):
        refused(small)
    time.sleep(EXAMINE_SECS + 1)  # so that the monitor has seen it, too
    assert pids(small) == before
    for _ in range(3):  # supervisord, which cannot write that down, starts it again
        (process,) = small.processes_of("kept")
        process.kill()
        eventually(lambda ended=process.pid: pids(small).get("kept:kept-0", str(ended)) != str(ended))
        eventually(lambda: embeds(small, "kept"))
        with suppress(OSError):
            fill(small.folder / "more")
    before["kept:kept-0"] = pids(small)["kept:kept-0"]
    assert pids(small) == before
    for filler in (*fillers, small.folder / "more"):
        filler.unlink()
    eventually(lambda: health(small)["status"] == "healthy")
    assert eventually(lambda: events(small, "disk_full"))  # kept in memory until there was room
    assert eventually(lambda: events(small, "trouble_over"))[-1]["trouble"] == "disk_full"
    assert small.create("late")["status"] == "starting"
    assert pids(small).items() >= before.items()


def test_a_read_only_disk_has_a_name_and_nothing_dies(small: RunningAppliance) -> None:
    before = pids(small)
    state = str(small.folder.parent / "state")
    mount("-o", "remount,ro", state)
    told = eventually(lambda: health(small) if "read_only" in health(small).get("reason", "") else None)
    assert told["status"] == "degraded"
    refused(small)
    time.sleep(EXAMINE_SECS + 1)
    assert pids(small) == before
    mount("-o", "remount,rw", state)
    eventually(lambda: health(small)["status"] == "healthy")
    assert eventually(lambda: events(small, "read_only"))
    assert small.create("late")["status"] == "starting"


@pytest.mark.long
@pytest.mark.parametrize("program", ["monitor", "control"])
def test_no_file_descriptors_is_no_crash(small: RunningAppliance, program: str) -> None:
    """What has none left says so as soon as it can, and works again when there are some."""
    (pid,) = (int(value) for name, value in pids(small).items() if name.partition(":")[2] == program or name == program)
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    old = [(process, process.rlimit(resource.RLIMIT_NOFILE)) for process in family]
    before = pids(small)
    for process, (_, hard) in old:
        process.rlimit(resource.RLIMIT_NOFILE, (3, hard))
    if program == "monitor":
        told = eventually(lambda: health(small) if health(small)["status"] == "degraded" else None, 60)
        assert "monitor_silent" in told["reason"]
    else:
        eventually(lambda: "answers" if not answered(small) else None)
    assert embeds(small, "kept")
    for process, limits in old:
        process.rlimit(resource.RLIMIT_NOFILE, limits)
    eventually(lambda: health(small)["status"] == "healthy", 30)
    assert {process.pid for process, _ in old} <= {process.pid for process in psutil.process_iter()}
    assert pids(small) == before
    if program == "monitor":
        assert eventually(lambda: events(small, "no_descriptors"))


def answered(running: RunningAppliance) -> bool:
    try:
        return running.get("/health").ok
    except OSError:
        return False
