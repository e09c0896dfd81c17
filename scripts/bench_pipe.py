"""sentence-transformers in a process of the benchmark's own environment, driven over a pipe."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The variable: of a machine that has these packages already, with a GPU for instance.
BENCH_PYTHON = os.environ.get("BENCH_PYTHON", str(ROOT / ".venv-bench" / "bin" / "python"))


class Reference:
    """arguments: of the script, which says what jobs there are."""

    def __init__(self, *arguments: str, script: str = "bench_reference.py") -> None:
        command = [BENCH_PYTHON, str(ROOT / "scripts" / script), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def job(self, **job: int | str) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))
