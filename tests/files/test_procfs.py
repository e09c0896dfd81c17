"""What /proc tells of a process."""

import os
import subprocess
from pathlib import Path

import pytest

from appliance.files.procfs import status_fields


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
