"""`appliance up` at its edges: nobody reads what it says; an address that no machine here has."""

import subprocess
from pathlib import Path

import pytest

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
