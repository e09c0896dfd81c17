"""How far a job is, in a file that others read: bytes done and in all, bytes a second, seconds left, and the step."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from appliance.core.views import JobProgress
from appliance.files.replacement import replace_file

EVERY_SECS = 0.5
WINDOW_SECS = 10.0  # over which the rate is taken


class ProgressFile:
    """Writes itself every half second, as a context manager. measure: bytes that have come since ``done`` was set."""

    def __init__(self, path: Path, step: str) -> None:
        self.path = path
        self.step = step
        self.total: int | None = None
        self.done = 0
        self.measure: Callable[[], int] = lambda: 0
        self.samples: deque[tuple[float, int]] = deque()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep, name="progress", daemon=True)

    def __enter__(self) -> ProgressFile:
        self.path.parent.mkdir(exist_ok=True)
        self.write()
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()
        self.thread.join()
        self.write()

    def keep(self) -> None:
        while not self.ended.wait(EVERY_SECS):
            self.write()

    def write(self) -> None:
        now, bytes_done = time.monotonic(), self.done + self.measure()
        self.samples.append((now, bytes_done))
        while now - self.samples[0][0] > WINDOW_SECS:
            self.samples.popleft()
        since, before = self.samples[0]
        rate = max(0.0, (bytes_done - before) / (now - since)) if now > since else None
        left = (self.total - bytes_done) / rate if rate and self.total is not None else None
        progress = JobProgress(
            bytes_done=bytes_done,
            bytes_total=self.total,
            bytes_per_sec=rate and round(rate),
            eta_secs=left and round(left, 1),
            step=self.step,
        )
        try:
            replace_file(self.path, json.dumps(progress.mapping()), durable=False)
        except OSError:
            pass  # a full disk ends the download itself, with a name
