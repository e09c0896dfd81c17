"""The floors of the house hold because a machine checks them: a planted import must break the check."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
PLANTED = {
    "core touches the machine": ("core/state.py", "import os"),
    "export touches the machine": ("export/supervisord.py", "import socket"),
    "core imports a driver": ("core/status.py", "from appliance.drivers import ports"),
    "one driver imports another": ("drivers/ports.py", "from appliance.drivers import logs"),
    "a driver imports the verbs": ("drivers/ports.py", "from appliance.operations import instances"),
    "what is true imports what changes": ("node/overview.py", "from appliance.operations import supervision"),
    "the data path imports what changes": ("gateway/app.py", "from appliance.operations import models"),
    "one program imports another": ("multiplexer/replica_pool.py", "from appliance.engine import batching"),
}


def lint(folder: Path) -> int:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", "setup.cfg"]
    # The copy must win over the installed package.
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True).returncode


@pytest.mark.parametrize(("file", "line"), PLANTED.values(), ids=PLANTED.keys())
def test_a_forbidden_import_breaks_lint(tmp_path: Path, file: str, line: str) -> None:
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    shutil.copytree(ROOT / "appliance", tmp_path / "appliance", ignore=shutil.ignore_patterns("__pycache__"))
    assert lint(tmp_path) == 0
    planted = tmp_path / "appliance" / file
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    assert lint(tmp_path) == 1
