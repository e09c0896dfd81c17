"""The last measurement of each instance (`appliance bench --sweep`), as the file in the data folder has it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from appliance.core.benchmark import LoadStep, saturation
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import Instance
from appliance.drivers import processes
from appliance.files.replacement import replace_file
from appliance.node.context import Node

RUNNING, DONE, FAILED = "running", "done", "failed"
STATUSES = (RUNNING, DONE, FAILED)
ARGUMENT = "--sweep"  # by which its process is known


@dataclass(frozen=True)
class Benchmark:
    """created_at: of the instance that was measured; another one of its name has none. pid: of what measures."""

    instance: str
    created_at: str
    started_at: str
    secs: float
    pid: int
    status: str = RUNNING
    error: str | None = None
    steps: tuple[LoadStep, ...] = ()

    def mapping(self) -> dict[str, Any]:
        """As REST tells it."""
        return {
            "instance": self.instance,
            "status": self.status,
            "started_at": self.started_at,
            "step_secs": self.secs,
            "steps": [step.mapping() for step in self.steps],
            "saturation": saturation(self.steps) if self.status == DONE else None,
            "error": self.error,
        }


def path_of(node: Node, name: str) -> Path:
    return Path(node.layout.benchmarks) / f"{name}.json"


def write(node: Node, benchmark: Benchmark) -> None:
    """Raises: OSError."""
    path = path_of(node, benchmark.instance)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(asdict(benchmark)), durable=False)


def read(path: Path) -> Benchmark | None:
    """None for what is no such file."""
    try:
        written = json.loads(path.read_text())
        return Benchmark(**{**written, "steps": tuple(LoadStep(**each) for each in written["steps"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_running(benchmark: Benchmark) -> bool:
    """Until who started the process has written down how it ended, and reaps it then."""
    pid = benchmark.pid
    return benchmark.status == RUNNING and (processes.runs(pid, ARGUMENT) or processes.is_zombie(pid))


def find(node: Node, instance: Instance) -> Benchmark | None:
    """Of this very instance. One whose process has ended without a word has failed."""
    found = read(path_of(node, instance.name))
    if found is None or found.created_at != instance.created_at:
        return None
    if found.status == RUNNING and not is_running(found):
        return replace(found, status=FAILED, error="It ended before it was done")
    return found


def age(node: Node, name: str) -> float:
    """Seconds since something was written of it; infinite where nothing was."""
    try:
        return time.time() - path_of(node, name).stat().st_mtime
    except OSError:
        return math.inf


def show(node: Node, name: str) -> Benchmark:
    """Raises: Problem."""
    found = find(node, node.state.read().get(name))
    if found is None:
        words = f"Instance {quoted(name)} was not measured yet: POST /instances/{name}/bench does"
        raise Problem(Kind.NOT_FOUND, "NOT_MEASURED", words)
    return found


def running(node: Node) -> Benchmark | None:
    """The one that measures now, also of an instance that was deleted meanwhile."""
    found = (read(path) for path in Path(node.layout.benchmarks).glob("*.json"))
    return next((each for each in found if each and is_running(each)), None)


def forget_others(node: Node, names: set[str]) -> None:
    """Delete the files of instances that are gone."""
    for path in Path(node.layout.benchmarks).glob("*.json"):
        if path.stem not in names:
            path.unlink(missing_ok=True)
