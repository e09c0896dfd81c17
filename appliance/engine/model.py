"""One loaded model: texts in, jobs out. Joins the folder, the tokenizer, the queue and the runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import NamedTuple

import numpy as np

from appliance.core.problems import Kind, Problem, invalid
from appliance.drivers.modelfolder import read_card
from appliance.engine.batching import CPU_TOKENS, Pool
from appliance.engine.metrics import Metrics
from appliance.engine.pooling import dense_layers
from appliance.engine.runtime import Runtime
from appliance.engine.tokens import Text, Tokens
from appliance.engine.worker import Job, Reduce, Worker

UNBOUNDED = 2**31
# Who computes steps back, alone it loses nothing by it: behind what only passes texts on, or refuses them (at equal
# priority a full multiplexer took 80 to 170 ms to refuse instead of 15), and batches behind single texts.
SINGLE_NICE, BATCH_NICE = 5, 10


class Lane(NamedTuple):
    """How a text goes to the model. A single text never waits for the batch that happens to run: single texts have
    threads of their own, and the machine shares its cores between the two."""

    permit: Callable[[], None]  # takes one permit, by waiting or by refusing
    single: bool


class Permits:
    """How many texts may be in work at once; TEI's max_concurrent_requests."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self.taken = 0  # ever
        self.seen = 0  # of these, at the last look
        self.changed = threading.Condition()

    def take(self) -> None:
        """One permit at once. Raises: Problem (exhausted) when there is none."""
        with self.changed:
            if not self.free:
                raise Problem(Kind.EXHAUSTED, "OVERLOADED", "Model is overloaded")
            self.free -= 1
            self.taken += 1

    def wait(self, gone: Callable[[], bool]) -> None:
        """One permit, as soon as there is one. Raises: CancelledError when the caller is ``gone`` first."""
        with self.changed:
            while not self.free and not gone():
                self.changed.wait(timeout=0.5)
            if gone():
                raise CancelledError
            self.free -= 1
            self.taken += 1

    def give(self) -> None:
        with self.changed:
            self.free += 1
            self.changed.notify()

    def idle(self) -> bool:
        """Whether nothing is in work, and nothing was since the last call."""
        with self.changed:
            quiet = self.free == self.count and self.taken == self.seen
            self.seen = self.taken
            return quiet


class Model:
    """The model of one engine process; loading it raises a Problem that says what is wrong with it.

    by_length False: batches in order of arrival, as TEI makes them (for comparison).
    """

    def __init__(
        self,
        folder: Path,
        graphs: Path,
        threads: int,
        pooling: str | None = None,
        max_batch_tokens: int = 16384,
        max_batch_requests: int | None = None,
        max_concurrent_requests: int = 512,
        default_prompt: str | None = None,
        default_prompt_name: str | None = None,
        by_length: bool = True,
        runtime: str = "onnxruntime",
        dtype: str | None = None,
    ) -> None:
        self.card = read_card(folder, pooling)
        self.max_tokens = min(self.card.max_tokens, max_batch_tokens)
        if default_prompt_name is not None:
            if default_prompt_name not in self.card.prompts:
                raise invalid(f"--default-prompt-name {default_prompt_name} is not one of the model's prompts")
            default_prompt = self.card.prompts[default_prompt_name]
        self.tokens = Tokens(self.card, self.max_tokens, default_prompt)
        self.dense = dense_layers(self.card)
        self.runtime = Runtime(self.card, graphs, threads, runtime, dtype, side_by_side=by_length)
        budget = min(CPU_TOKENS, max_batch_tokens)
        self.metrics = Metrics(self.max_tokens)
        self.healthy = True
        at_once = self.runtime.at_once
        self.workers = {
            single: Worker(
                self.runtime,
                self.card,
                Pool(budget, max_batch_requests or UNBOUNDED, by_length, at_once),
                self.metrics,
                self.note_result,
                threads=at_once,
                nice=SINGLE_NICE if single else BATCH_NICE,
            )
            for single in (True, False)
        }
        self.permits = Permits(max_concurrent_requests)
        self.on_health: Callable[[bool], None] = lambda ok: None
        self.warm_up()

    def warm_up(self) -> None:
        """One real forward pass before the port opens. Raises: Problem when the model cannot compute."""
        encoding = self.tokens.run(self.tokens.tokenizer, "warm")
        job = self.workers[True].submit(encoding, np.copy, 0.0, release=lambda: None)
        width = int(job.outcome.result().shape[-1])
        self.width = len(self.dense[-1].weight) if self.dense else width
        if self.card.task in ("reranker", "classifier") and width != len(self.card.labels):
            raise invalid(f"The model gives {width} scores but config.json names {len(self.card.labels)} labels")

    def note_result(self, ok: bool) -> None:
        """TEI's health of the model: whether its last batch could be computed."""
        if ok != self.healthy:
            self.healthy = ok
            self.on_health(ok)

    def submit(
        self, lane: Lane, text: Text, reduce: Reduce, truncate: bool, left: bool, prompt_name: str | None = None
    ) -> Job:
        """Tokenize here, compute in the lane's worker; the permit is given back when the text is done."""
        lane.permit()
        began = time.monotonic()
        try:
            encoding = self.tokens.encode(text, truncate, left, prompt_name)
        except BaseException:
            self.permits.give()
            raise
        self.metrics.lengths.observe(len(encoding))
        return self.workers[lane.single].submit(encoding, reduce, time.monotonic() - began, self.permits.give)
