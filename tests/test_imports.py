"""What each program imports when it starts: libraries that it does not need cost every start time, and memory for good.

Measured (Python 3.11, 2 cores): without them control starts with 0.19 s of CPU instead of 0.30, a multiplexer with 0.30
instead of 0.48, the gateway with 0.36 instead of 0.50, the monitor with 0.22 instead of 0.42.
"""

import subprocess
import sys

import pytest

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
    "cli": {"cryptography", "numpy", "pyarrow", "falcon", "onnx", "shtab"},
}


@pytest.mark.parametrize("program", UNNEEDED)
def test_a_program_imports_only_what_it_needs(program: str) -> None:
    module = "appliance.cli" if program == "cli" else f"appliance.{program}.__main__"
    script = f"import sys, {module}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "appliance" in modules
    assert UNNEEDED[program].isdisjoint(modules)
