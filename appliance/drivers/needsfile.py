"""What workloads (see `core.placement`) were measured to take, each kind in a file of its own: memory of
GPUs, memory, seconds to load. That is used for as long as the data folder exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock

from appliance.files.replacement import replace_file

Number = TypeVar("Number", int, float)
MOST_ENTRIES = 1000  # the oldest measurement goes first


class NeedsFile(Generic[Number]):
    """workload -> what one replica of it takes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, Number]:
        try:
            stored: dict[str, Number] = json.loads(self.path.read_text())
        except (OSError, ValueError):  # it will be measured again
            return {}
        return stored

    def raise_to(self, peaks: dict[str, Number]) -> None:
        """Keep the higher of the stored peak and the new one for each workload. Raises: OSError, filelock.Timeout."""
        with self.locked():
            stored = self.read()
            self.merge(stored, {key: peak for key, peak in peaks.items() if peak > stored.get(key, 0)})

    def put(self, workload: str, measured: Number) -> None:
        """Keep the latest. Raises as `raise_to`."""
        with self.locked():
            self.merge(self.read(), {workload: measured})

    def locked(self) -> FileLock:
        return FileLock(self.path.with_suffix(".lock"), timeout=5)

    def merge(self, stored: dict[str, Number], new: dict[str, Number]) -> None:
        """Under the lock."""
        if new:
            merged = {workload: each for workload, each in stored.items() if workload not in new} | new
            replace_file(self.path, json.dumps(dict(list(merged.items())[-MOST_ENTRIES:]), indent=1), durable=False)
