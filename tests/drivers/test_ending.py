"""A process that leaves has said all that it had to say."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
PROGRAM = """
import atexit, logging, sys
from appliance.drivers.ending import leave
atexit.register(print, "taken apart")
logging.basicConfig(stream=sys.stderr)
print("said", end="")
logging.warning("logged")
leave(7)
"""


def test_it_ends_at_once_with_its_status_and_all_that_was_printed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "said", "WARNING:root:logged\n")
