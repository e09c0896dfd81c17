"""What each program imports when it starts: libraries that it does not need cost every start time, and memory for good.

Measured (Python 3.11, 2 cores): without them control starts with 0.19 s of CPU instead of 0.30, a multiplexer with 0.30
instead of 0.48, the gateway with 0.36 instead of 0.50, the monitor with 0.22 instead of 0.42. A command that asks
control takes 0.47 times the CPU that it took with grpc and all that supervises, and `up` ends with 0.64 times as much.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from testing.running import free_ports

pytestmark = pytest.mark.processes

# TLS is imported where it is on, `requests` by the command line, onnx where a graph is built, httpx2 where a model is
# downloaded.
UNNEEDED = {
    "control": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "onnx"},
    "multiplexer": {"requests", "cryptography", "falcon", "onnx", "huggingface_hub"},
    "gateway": {"requests", "cryptography", "onnx"},
    "express": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "falcon", "onnx"},
    "monitor": {"requests", "cryptography", "grpc", "pyarrow", "falcon", "onnx"},
    "jobs": {"requests", "cryptography", "grpc", "httpx2", "numpy", "pyarrow", "falcon", "onnx"},
    "engine": {"requests", "cryptography", "pyarrow", "falcon", "onnx", "supervisor"},
    "tei": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "falcon", "onnx"},
    "cli": {
        "requests",
        "cryptography",
        "grpc",
        "google.protobuf",
        "psutil",
        "supervisor",
        "numpy",
        "pyarrow",
        "falcon",
    },
    "ending": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "falcon", "onnx", "shtab"},
}
# What the command line is without while it does this, in a folder where nothing runs.
COMMANDS = {
    "instances list": {"cryptography", "grpc", "google.protobuf", "psutil", "supervisor", "numpy", "pyarrow", "falcon"},
    "down": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "falcon"},
    "doctor": {"requests", "cryptography", "grpc", "numpy", "pyarrow", "falcon"},
}


def modules_after(script: str, *arguments: str) -> set[str]:
    """What is imported when a program ends."""
    script = f"import sys\n{script}\nprint(*sys.modules)"
    command = [sys.executable, "-c", script, *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(told.splitlines()[-1].split())


@pytest.mark.parametrize("program", UNNEEDED)
def test_a_program_imports_only_what_it_needs(program: str) -> None:
    module = {"cli": "appliance.cli", "ending": "appliance.cli.ending"}.get(program, f"appliance.{program}.__main__")
    modules = modules_after(f"import {module}")
    assert "appliance" in modules
    assert UNNEEDED[program].isdisjoint(modules)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_only_what_it_needs(tmp_path: Path, command: str) -> None:
    script = "from pathlib import Path; from appliance.cli.main import main; main(sys.argv[2:], Path(sys.argv[1]))"
    config = tmp_path / "appliance.toml"
    config.write_text(f"data_dir = '{tmp_path / 'data'}'\napi_port = {free_ports(1)[0]}\n")
    modules = modules_after(script, str(tmp_path), "--config", str(config), *command.split())
    assert "appliance" in modules
    assert COMMANDS[command].isdisjoint(modules)
