"""Starts the programs of `children`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(what: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.drivers.children", what, *map(str, arguments)]


def run(what: str, *arguments: object) -> str:
    """What it printed; it must end well."""
    return subprocess.run(
        command(what, *arguments), cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def run_together(*calls: tuple[object, ...]) -> None:
    """All at the same time; all must end well."""
    running = [subprocess.Popen(command(str(call[0]), *call[1:]), cwd=ROOT) for call in calls]
    assert [process.wait(timeout=60) for process in running] == [0] * len(calls)
