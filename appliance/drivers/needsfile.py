"""`gpu_needs.json`: how much GPU memory replicas took, measured once and used for as long as the data folder exists."""

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
            peaks: dict[str, int] = json.loads(self.path.read_text())
        except (OSError, ValueError):  # it will be measured again
            return {}
        return peaks

    def raise_to(self, peaks: dict[str, int]) -> None:
        """Keep the higher of the stored peak and the new one for each workload. Raises: OSError, filelock.Timeout."""
        with FileLock(self.path.with_suffix(".lock"), timeout=5):
            stored = self.read()
            higher = {workload: peak for workload, peak in peaks.items() if peak > stored.get(workload, 0)}
            if not higher:
                return
            merged = {workload: peak for workload, peak in stored.items() if workload not in higher} | higher
            entries = dict(list(merged.items())[-MOST_ENTRIES:])
            replace_file(self.path, json.dumps(entries, indent=1), durable=False)
