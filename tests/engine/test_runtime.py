"""How many passes of one model run at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from appliance.drivers.modelfolder import read_card
from appliance.engine.runtime import LONG_AT_ONCE, LONG_TOKENS, Runtime
from tests.engine.serving import FAMILIES


class Counting:
    """A session that notes how many run it at once."""

    at_once = 1

    def __init__(self) -> None:
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.05)
        with self.lock:
            self.running -= 1
        return np.zeros((1, feed["input_ids"].shape[1], 1), np.float32)


def test_long_rows_are_bounded_however_many_batches_run_at_once(tmp_path: Path) -> None:
    runtime = Runtime(read_card(FAMILIES / "bert-cls", None), tmp_path, 8, "onnxruntime", None)
    long, short = Counting(), Counting()
    runtime.sessions = {True: long, False: short}
    for tokens in (LONG_TOKENS + 1, LONG_TOKENS):
        row = np.ones((1, tokens), np.int64)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda row: runtime.run(row, row, row), [row] * 16))
    assert long.most == LONG_AT_ONCE
    assert short.most > LONG_AT_ONCE
    assert runtime.at_once == 8
