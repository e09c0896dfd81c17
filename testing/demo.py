"""Programs in the environment of the demonstration (`make demo`), which has a driver for a browser."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-demo" / "bin" / "python"


def environment() -> dict[str, str]:
    """Without proxies, which know nothing of this machine."""
    return {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}


def program(module: str, *arguments: object) -> Any:
    """What a module prints as JSON."""
    command = [str(PYTHON), "-m", module, *map(str, arguments)]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])
