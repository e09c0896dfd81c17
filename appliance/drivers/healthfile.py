"""`health.json`: the monitor writes what its probes measured, and any number of programs read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appliance.files.replacement import replace_file


class ProbedProcess(NamedTuple):
    """The process of a replica. ready: it has answered a probe; checked_at: of the last one, RFC 3339 UTC."""

    instance: str
    replica: int
    launch: int
    pid: int
    ready: bool
    checked_at: str


class Probes:
    """What the monitor has written: instance -> launch, and for each replica its probes."""

    def __init__(self, health: Mapping[str, Any]) -> None:
        self.health = health

    def since(self, launch: int, instance: str) -> list[dict[str, Any]]:
        """`failures` and `checked_at` (RFC 3339 UTC) of each replica that was probed since this launch."""
        health = self.health.get(instance, {})
        return list(health.get("replicas", {}).values()) if health.get("launch") == launch else []


class HealthFile:
    """instance -> launch, and for each replica its missed probes in a row and the time of the last one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, health: dict[str, Any]) -> None:
        """Not durable: after a crash the monitor measures again. Raises: OSError."""
        replace_file(self.path, json.dumps(health), durable=False)

    def written_at(self) -> float | None:
        """When the file was last written, in seconds since 1970; None when there is none."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def read(self) -> Probes:
        """What was measured; nothing where the file cannot be read."""
        try:
            health = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return Probes({})
        return Probes(health)

    def processes(self) -> list[ProbedProcess]:
        """The processes of all replicas; empty when the file cannot be read."""
        try:
            health = json.loads(self.path.read_text())
            return [
                ProbedProcess(name, int(replica), entry["launch"], probe["pid"], probe["ready"], probe["checked_at"])
                for name, entry in health.items()
                for replica, probe in entry["replicas"].items()
                if probe.get("pid")
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
