"""A gateway that answers as a test says, and programs in the environment of the demonstration (`make demo`)."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.fake_gateway import FakeGateway

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-demo" / "bin" / "python"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    yield fake
    fake.close()


def environment() -> dict[str, str]:
    """Without proxies, which know nothing of this machine."""
    return {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}


def program(module: str, *arguments: object) -> Any:
    """What a program of tests/examples prints as JSON."""
    command = [str(PYTHON), "-m", f"tests.examples.{module}", *map(str, arguments)]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])
