"""Forward passes on a GPU, recorded once for each shape of batch and replayed as one call.

A forward pass of transformers is some hundred small calls of torch, each of which gives up the interpreter's lock and
asks for it again. Beside the threads that serve calls that took 40 ms for a batch which the GPU computes in 4, and a
lone text waits for 200 launches. A recording is launched as a whole, without the interpreter.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch

log = logging.getLogger("appliance.engine")
# Batches are filled up to the next of these sizes; longer texts, and larger batches, are computed as they come.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FIRST = (8, 16, 32, 64)  # lone texts of so many tokens are recorded before the first call

Forward = Callable[[torch.Tensor], torch.Tensor]  # [inputs, rows, tokens] to [rows, values]


class Launched(NamedTuple):
    """The output of a replay, and when it is there."""

    output: torch.Tensor
    is_there: torch.cuda.Event

    def rows(self, count: int) -> np.ndarray:
        """Wait for the first so many rows."""
        self.is_there.synchronize()
        rows: np.ndarray = self.output[:count].numpy()
        return rows


class RecordedPass:
    """A forward pass for one shape. Not thread-safe.

    Raises: torch.OutOfMemoryError; RuntimeError where it cannot be recorded.
    """

    def __init__(
        self, forward: Forward, shape: tuple[int, ...], pool: tuple[int, int], stream: torch.cuda.Stream
    ) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.given = torch.zeros(shape, dtype=torch.int64, device="cuda")
            self.given[:, :, 0] = 1
            forward(self.given)  # what libraries set up with their first call cannot be recorded
            stream.synchronize()
            torch.cuda.empty_cache()  # a recording has memory of its own
            # Other threads may use the GPU meanwhile.
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            is_complete = False
            try:
                self.output = forward(self.given)
                is_complete = True
            finally:
                with nullcontext() if is_complete else suppress(RuntimeError):  # the first one says what is wrong
                    self.graph.capture_end()

    def launch(self, values: np.ndarray, stream: torch.cuda.Stream) -> Launched:
        """Put it behind what the stream does already. The next one may be launched at once, of any recording."""
        with torch.cuda.stream(stream):
            self.given.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
            self.graph.replay()
            result = torch.empty(self.output.shape, dtype=self.output.dtype, pin_memory=True)
            result.copy_(self.output, non_blocking=True)
            # Who waits for a lone text does it awake: that is quicker, and takes a core meanwhile.
            is_there = torch.cuda.Event(blocking=len(values[0]) > 1)
            is_there.record(stream)
        return Launched(result, is_there)


class CudaGraphs:
    """The recordings of one model and what is pooled of its hidden states. Thread-safe.

    They share their memory, so the GPU replays one after the other, in the order of one stream. While it does, the next
    one is launched: it never waits for the interpreter.
    """

    def __init__(self, forward: Forward, inputs: int) -> None:
        self.forward = forward
        self.inputs = inputs
        self.lock = threading.Lock()
        torch.cuda.synchronize()  # the weights may still be on their way
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.recordings: dict[tuple[int, int], RecordedPass] = {}
        self.works = True

    def record_first(self) -> None:
        with self.lock:
            for tokens in FIRST:
                if self.works:
                    self.recorded((1, tokens))

    def run(self, arrays: list[np.ndarray], mask_at: int) -> np.ndarray | None:
        """The output for int64 inputs [rows, tokens]; None where it is to be computed otherwise.

        mask_at: which of the inputs is the attention mask. Raises: torch.OutOfMemoryError.
        """
        rows, tokens = arrays[0].shape
        shape = next_size(ROWS, rows), next_size(TOKENS, tokens)
        if not self.works or 0 in shape:
            return None
        given = np.zeros((self.inputs, *shape), np.int64)
        for own, array in zip(given, arrays, strict=True):
            own[:rows, :tokens] = array
        given[mask_at, rows:, 0] = 1  # a row in which nothing counts would be no number
        with self.lock:
            recording = self.recordings.get(shape) or self.recorded(shape)
            launched = recording.launch(given, self.stream) if recording else None
        return launched.rows(rows) if launched else None

    def recorded(self, shape: tuple[int, int]) -> RecordedPass | None:
        """Under the lock. None from the first one on that cannot be recorded; what there is is given up then.

        Raises: torch.OutOfMemoryError.
        """
        try:
            self.recordings[shape] = RecordedPass(self.forward, (self.inputs, *shape), self.pool, self.stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's own
            log.warning("Batches of %s rows and %s tokens cannot be recorded, so none are: %s", *shape, error)
            self.works = False
            self.recordings.clear()
        return self.recordings.get(shape)


def next_size(sizes: tuple[int, ...], count: int) -> int:
    """0 where all are smaller."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else 0
