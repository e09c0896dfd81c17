"""How many passes of one model run at once, and at which priority."""

import itertools
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.drivers.modelfolder import read_card
from appliance.engine.intake import Lane
from appliance.engine.model import BATCH_NICE, SINGLE_NICE, LoadedModel
from appliance.engine.runtime import LONG_AT_ONCE, LONG_TOKENS, PaddedBatch, Runtime
from appliance.engine.worker import TextJob, whole
from testing.engines import FAMILIES


class Counting:
    """A session that notes how many run it at once."""

    at_once, on_cpu, token_secs = 1, True, 1.0

    def __init__(self) -> None:
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def run(self, feed: dict[str, np.ndarray], alone: bool, pooling: str | None) -> np.ndarray:
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
            list(threads.map(lambda row: runtime.run(PaddedBatch(row, row, row, row[:, 0])), [row] * 16))
    assert long.most == LONG_AT_ONCE
    assert short.most > LONG_AT_ONCE
    assert runtime.at_once == 8


@pytest.mark.parametrize(("gpus", "says"), [("0", True), ("GPU-0000aaaa-1", True), ("", False), ("-1", False)])
def test_who_was_given_a_gpu_and_computes_on_the_cpu_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: str, says: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    Runtime(read_card(FAMILIES / "bert-cls", None), tmp_path, 1, "onnxruntime", None)
    assert (f"computes on the CPU though CUDA_VISIBLE_DEVICES={gpus} names a GPU" in caplog.text) is says


@pytest.mark.parametrize("single", [True, False])
def test_each_lane_computes_as_many_batches_at_once_as_threads(tmp_path: Path, single: bool) -> None:
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=3)
    together = threading.Barrier(3)  # passed by three at once, or broken by the time limit
    priorities = []

    def run(batch: PaddedBatch, alone: bool, pooling: str | None) -> np.ndarray:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        together.wait(timeout=20)
        return np.zeros((*batch.input_ids.shape, model.width), np.float32)

    model.runtime.run = run  # type: ignore[assignment,method-assign]
    model.runtime.session(long=False).token_secs = 1.0  # a batch of this model is not worth a thread
    lane = Lane(model.permits, single)

    def submitted(text: str) -> TextJob:
        return model.submit(lane, text, whole, truncate=True, left=False)

    with ThreadPoolExecutor(3) as callers:
        jobs = list(callers.map(submitted, ("one", "two", "three")))
    assert [job.outcome.result(timeout=30).shape[-1] for job in jobs] == [model.width] * 3
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        lower = min(19, own + (SINGLE_NICE if single else BATCH_NICE))
        # The first of the single texts came while nothing was in work: its caller computes it.
        assert sorted(priorities) == [own if single else lower, lower, lower]


def test_what_a_token_costs_is_measured_by_the_clock_of_the_thread_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several threads it tells a part, which is taken for all of them."""
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=2)
    session: Any = model.runtime.session(long=False)
    assert 0 < session.token_secs < 1, "of the warm-up"
    encoding = model.tokens.encode("rain over the harbour", truncate=True)
    ticks = itertools.count()
    monkeypatch.setattr("appliance.engine.runtime.time.thread_time", lambda: float(next(ticks)))
    for rows, threads in ((4, 1), (1, 2)):
        session.token_secs = math.inf
        model.runtime.run(model.runtime.batch([encoding] * rows))
        assert session.token_secs == threads / (rows * len(encoding))
    session.note_cost(0.0)
    assert session.token_secs == 2 / len(encoding), "a clock that has not moved tells nothing"


def test_one_thread_computes_what_is_there_before_another_is_awake(tmp_path: Path) -> None:
    model = LoadedModel(FAMILIES / "bert-cls", tmp_path, threads=2)
    session: Any = model.runtime.session(long=False)
    encoding = model.tokens.encode("rain over the harbour", truncate=True)
    feed = model.runtime.batch([encoding])._asdict()
    used: list[str] = []

    class Told:
        def __init__(self, name: str, own: Any) -> None:
            self.name, self.own = name, own

        def run(self, *given: Any) -> Any:
            used.append(self.name)
            return self.own.run(*given)

    for name in ("alone", "lone", "several"):
        setattr(session, name, Told(name, getattr(session, name)))
    outputs = []
    for token_secs, alone in itertools.product((math.inf, 1.0, 1e-6), (False, True)):
        session.token_secs = token_secs  # which each run measures anew
        outputs.append(session.run(feed, alone, None))
    assert used == ["lone", "alone", "lone", "alone", "several", "several"]
    for output in outputs:
        np.testing.assert_allclose(output, outputs[0], atol=1e-5)
