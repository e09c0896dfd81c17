"""How much GPU memory replicas were seen to take: `gpu_needs.json`, kept for as long as the data folder."""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock

from appliance.files.replacement import replace_file

MOST_ENTRIES = 1000  # the oldest measurement goes first


class NeedsFile:
    """workload (see `core.placement`) -> the peak of one replica in bytes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(self.path.read_text())
        except (OSError, ValueError):  # it is measured anew
            return {}
        return found

    def raise_to(self, peaks: dict[str, int]) -> None:
        """Keep the higher of what is known and what was seen. Raises: OSError, filelock.Timeout."""
        with FileLock(self.path.with_suffix(".lock"), timeout=5):
            known = self.read()
            higher = {workload: peak for workload, peak in peaks.items() if peak > known.get(workload, 0)}
            if not higher:
                return
            kept = {workload: peak for workload, peak in known.items() if workload not in higher} | higher
            entries = dict(list(kept.items())[-MOST_ENTRIES:])
            replace_file(self.path, json.dumps(entries, indent=1), durable=False)
