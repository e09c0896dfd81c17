"""Malformed gRPC, Arrow and HTTP/2 messages to a busy multiplexer: nothing dies, hangs or grows (scripts/fuzz.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]
FUZZ = Path(__file__).parent.parent.parent / "scripts" / "fuzz.py"


@pytest.mark.long
@pytest.mark.parametrize("messages", [1500, 100_000])
def test_malformed_messages_break_nothing(messages: int) -> None:
    ended = subprocess.run([sys.executable, FUZZ, str(messages)], capture_output=True, text=True)
    print(ended.stdout[-8000:])
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-3000:]
