"""OpenVINO on the same graph, where it is installed (extra `openvino`) and asked for with `--runtime openvino`.

On CPUs with bf16 units `--dtype bfloat16` was measured at 4 times sentence-transformers' throughput on MiniLM, with
cosine 0.99996 to float32.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from pathlib import Path

import numpy as np
import onnx

# On import, openvino reports to its maker over the network and writes into the home folder (2026.4). An entry of None
# makes the import of its telemetry fail, which openvino tolerates.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

import openvino  # noqa: E402

log = logging.getLogger("appliance.engine")


class OpenVinoSession:
    """One graph, compiled twice: for lone rows, which have all threads, and for batches.

    streams: how many batches run at once, each on its share of the threads; bfloat16: compute in bfloat16.
    """

    token_secs = math.inf

    def __init__(self, graph: bytes, folder: Path, threads: int, streams: int, bfloat16: bool) -> None:
        core = openvino.Core()
        if bfloat16 and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            log.warning("This CPU has no bfloat16 units: it is emulated and several times slower than float32")
        model = onnx.load_from_string(graph)
        # Its own reader refuses external data outside the graph's own folder, symbolic links included (2026.4).
        onnx.load_external_data_for_model(model, str(folder))
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
            "ENABLE_CPU_PINNING": False,  # pinned threads of two engines sat on one core (2026.4)
        }
        read = core.read_model(model.SerializeToString(), b"")
        self.at_once = streams
        self.on_cpu = True
        self.models = {
            lone: core.compile_model(read, "CPU", {**options, "NUM_STREAMS": 1 if lone else streams})
            for lone in (True, False)
        }
        self.inputs = [port.get_any_name() for port in read.inputs]
        self.own = threading.local()  # a request belongs to one thread

    def run(self, feed: dict[str, np.ndarray], alone: bool, pooling: str | None) -> np.ndarray:
        requests = self.own.__dict__.setdefault("requests", {})
        lone = len(feed["input_ids"]) == 1
        if lone not in requests:
            requests[lone] = self.models[lone].create_infer_request()
        output: np.ndarray = requests[lone].infer({name: feed[name] for name in self.inputs})[0]
        return output.copy()  # the next batch overwrites the request's own buffer
