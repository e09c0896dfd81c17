"""onnxruntime on one model folder: a batch of token rows in, one array out.

A folder with safetensors of a known family gets its graph built once and kept under the data folder, keyed by what it
was built from; a folder with model.onnx or onnx/model.onnx is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from appliance.core.problems import Kind, Problem, invalid
from appliance.engine.folder import Card
from appliance.engine.weights import Tensor, tensors_of

log = logging.getLogger(__name__)
BUILDER_VERSION = 1  # raise it when `graph.build` makes another graph of the same model
LONG_TOKENS = 1024  # from here on a row runs alone, on the graph whose memory grows with its length only
HEADS = {"embedding": "hidden", "sparse": "sparse", "reranker": "scores", "classifier": "scores"}
SHIPPED = ("model.onnx", "onnx/model.onnx")
SHIPPED_OUTPUTS = {
    "hidden": ("last_hidden_state", "token_embeddings", "hidden"),
    "sparse": ("sparse",),
    "scores": ("logits", "scores"),
}


class Runtime:
    """The sessions of one model. `run` may be called from one thread at a time."""

    def __init__(self, card: Card, graphs: Path, threads: int) -> None:
        self.card = card
        self.graphs = graphs
        self.threads = threads
        self.head = HEADS[card.task]
        self.shipped = next((card.folder / name for name in SHIPPED if (card.folder / name).exists()), None)
        self.buildable = (card.folder / "model.safetensors").exists() or (
            card.folder / "model.safetensors.index.json"
        ).exists()
        if not self.shipped and not self.buildable:
            raise invalid(
                f"{card.folder} has neither model.safetensors nor onnx/model.onnx: convert the model to one of these"
            )
        self.lock = threading.Lock()
        self.sessions: dict[bool, onnxruntime.InferenceSession] = {}
        self.session(long=False)

    @property
    def long_graph(self) -> bool:
        """Whether long rows have a graph of their own."""
        return self.shipped is None and self.head != "sparse" and self.card.model_type != "mpnet"

    def run(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray) -> np.ndarray:
        """One forward pass. All three int64 [rows, tokens]; the result is float32, shaped as `graph.build` says."""
        session = self.session(long=self.long_graph and len(ids) == 1 and ids.shape[1] > LONG_TOKENS)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        feed = {value.name: given[value.name] for value in session.get_inputs()}
        output: np.ndarray = session.run([self.output_of(session)], feed)[0]
        return output

    def output_of(self, session: onnxruntime.InferenceSession) -> str:
        names = [value.name for value in session.get_outputs()]
        return next(name for name in (*SHIPPED_OUTPUTS[self.head], *names) if name in names)

    def session(self, long: bool) -> onnxruntime.InferenceSession:
        with self.lock:
            if long not in self.sessions:
                self.sessions[long] = self.load(long)
            return self.sessions[long]

    def load(self, long: bool) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        # Spinning threads of several engines take each other's cores: four of them lost half their throughput.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        if self.shipped:
            model: str | bytes = str(self.shipped.resolve())
        else:
            tensors = tensors_of(self.card.folder)
            folder = next(iter(tensors.values())).file.parent
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
            model = self.graph(tensors, long)
        try:
            return onnxruntime.InferenceSession(model, options, providers=providers())
        except Exception as error:  # onnxruntime raises its own C++ exceptions, without a common base
            raise Problem(
                Kind.INVALID, "UNSUPPORTED_MODEL", f"onnxruntime cannot load {self.card.folder}: {error}"
            ) from error

    def graph(self, tensors: dict[str, Tensor], long: bool) -> bytes:
        """The built graph, from the data folder if it was built before."""
        kept = self.graphs / f"{graph_key(self.card, tensors, self.head, long)}.onnx"
        if kept.exists():
            return kept.read_bytes()
        from appliance.engine import graph  # it imports onnx: 0.2 s and 30 MB that later starts save

        content = graph.build(self.card.config, tensors, self.head, long).SerializeToString()
        try:
            self.graphs.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_bytes(content)
            fresh.replace(kept)
        except OSError as error:
            log.warning("Cannot keep the graph in %s (%s); it is built again at the next start", self.graphs, error)
        return content


def graph_key(card: Card, tensors: dict[str, Tensor], head: str, long: bool) -> str:
    """A digest of everything that decides the graph: the builder, the config, and where each tensor lies."""
    places = {name: {**asdict(found), "file": found.file.name} for name, found in sorted(tensors.items())}
    decides = [BUILDER_VERSION, card.config, places, head, long]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:32]


def providers() -> list[str]:
    """CUDA where onnxruntime was installed with it, else the CPU."""
    wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
    return [name for name in wanted if name in onnxruntime.get_available_providers()]


def threads_for(engines: int, cores: int) -> int:
    """Threads of one engine, so that all engines of the machine together have as many as there are cores."""
    return max(1, cores // max(1, engines))


def rows(encodings: list[Any], card: Card) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, mask, types) of a batch of encodings, padded on the right to the longest."""
    longest = max(len(encoding) for encoding in encodings)
    ids = np.full((len(encodings), longest), card.pad_id, np.int64)
    mask = np.zeros_like(ids)
    types = np.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        length = len(encoding)
        ids[row, :length] = encoding.ids
        mask[row, :length] = 1
        if card.typed:
            types[row, :length] = encoding.type_ids
    return ids, mask, types
