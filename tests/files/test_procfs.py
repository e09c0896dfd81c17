"""What /proc tells of a process."""

import os
import subprocess
from pathlib import Path

import pytest

from appliance.files.procfs import status_fields, variable_of
from testing.running import eventually


def test_the_parent_and_the_state_of_this_process() -> None:
    state, parent, *_ = status_fields(os.getpid())
    assert (state, int(parent)) == (b"R", os.getppid())


def test_a_name_may_have_brackets_and_blanks(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        try:
            assert int(status_fields(process.pid)[1]) == os.getpid()
        finally:
            process.kill()
    with pytest.raises(OSError):
        status_fields(process.pid)


def test_a_variable_of_a_process() -> None:
    environ = {"AB": "wrong", "B": "a=b ü", "EMPTY": "", "C": "B=wrong"}
    with subprocess.Popen(["/bin/sleep", "60"], env=environ) as process:
        try:
            eventually(lambda: variable_of(process.pid, "B"))  # right behind its exec it has no environment yet
            assert [variable_of(process.pid, name) for name in ("B", "EMPTY", "A")] == ["a=b ü", "", None]
        finally:
            process.kill()
    with pytest.raises(OSError):
        variable_of(process.pid, "B")
