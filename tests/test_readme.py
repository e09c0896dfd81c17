"""The README is part of the product: its commands run, its programs run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from testing.running import RunningAppliance

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def here(text: str, running: RunningAppliance) -> str:
    """The README's addresses are the defaults; the tests' appliance has its own."""
    text = text.replace("127.0.0.1:9000", f"127.0.0.1:{running.api_port}")
    text = text.replace("127.0.0.1:9001", f"127.0.0.1:{running.grpc_port}")
    text = text.replace("127.0.0.1:9002", f"127.0.0.1:{running.http_port}")
    # One that names its own configuration keeps it.
    text = re.sub(r"\.venv/bin/appliance (?!--config)", f".venv/bin/appliance --config {running.config} ", text)
    return text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")


@pytest.mark.timeout(400)
def test_every_shell_command_works(appliance: RunningAppliance) -> None:
    assert len(blocks("sh")) >= 5
    try:
        for block in blocks("sh"):
            for command in re.sub(r"\\\n", " ", block).splitlines():
                works(here(command, appliance), appliance)
    finally:  # others use it, too: ten minutes later it would sleep
        kept = {"aliases": [], "idle_unload_secs": 0}
        assert requests.patch(f"{appliance.url}/instances/minilm", json=kept, timeout=60).status_code == 200


def works(command: str, appliance: RunningAppliance) -> None:
    result = subprocess.run(command, shell=True, cwd=ROOT, env=appliance.environ, capture_output=True, timeout=180)
    assert result.returncode == 0, (command, result.stderr)
    assert result.stdout, command
    assert b'"error"' not in result.stdout, (command, result.stdout)


@pytest.mark.parametrize(("place", "output"), [(0, "384 4\n"), (1, "1\n")])
def test_the_python_programs_work(appliance: RunningAppliance, place: int, output: str) -> None:
    assert len(blocks("python")) == 2
    command = [sys.executable, "-c", here(blocks("python")[place], appliance)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == output, result.stderr
