"""What the monitor has measured, for the others to show: `health.json`, with one writer and any number of readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.files.replacement import replace_file


class HealthFile:
    """instance -> launch, and for each replica its missed probes in a row and when it was last asked."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, told: dict[str, Any]) -> None:
        """Not durable: after a crash it is measured anew. Raises: OSError."""
        replace_file(self.path, json.dumps(told), durable=False)

    def forget(self) -> None:
        """No process that was told of lives any more. Raises: OSError."""
        self.path.unlink(missing_ok=True)

    def told_at(self) -> float | None:
        """When it was last written, in seconds since 1970."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def of(self, name: str, launch: int) -> list[dict[str, Any]]:
        """`failures` and `checked_at` (RFC 3339 UTC) of each replica that was asked since this launch."""
        try:
            told = json.loads(self.path.read_text()).get(name, {})
        except (OSError, ValueError):
            return []
        return list(told.get("replicas", {}).values()) if told.get("launch") == launch else []

    def processes(self) -> list[tuple[str, int, int, int, bool, str]]:
        """(instance, replica, launch, process id, whether it has answered, when it was asked) of each replica."""
        try:
            told = json.loads(self.path.read_text())
            return [
                (name, int(replica), entry["launch"], seen["pid"], seen["ready"], seen["checked_at"])
                for name, entry in told.items()
                for replica, seen in entry["replicas"].items()
                if seen.get("pid")
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
