"""The model's arithmetic: a batch of token rows in, one array out, on onnxruntime, OpenVINO or torch.

For a folder with safetensors of a known family the graph is built once and kept in the data folder, under a digest of
everything that decides it. The model.onnx or onnx/model.onnx of a folder is used unchanged.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime

from appliance.core.families import HEADS, architecture_of
from appliance.core.problems import Problem, invalid
from appliance.core.servable import WEIGHTS, chosen_dtype
from appliance.drivers.modelfolder import Card
from appliance.engine.kept_graphs import graph_key, keep_graph, kept_graph
from appliance.engine.special_tokens import NO_ADAPTER
from appliance.engine.weights import Tensor, tensors_of
from appliance.node.servable import refuse_missing_runtime, refuse_unfit_runtime, shipped_graph

log = logging.getLogger(__name__)
MOST_AT_ONCE = 16  # batches; each has its own memory
LARGEST_GRAPH = 2**31 - 1  # bytes of a protobuf message
LONG_TOKENS = 1024  # from here on a row runs alone, on the graph whose memory grows with its length only
LONG_AT_ONCE = 2  # such rows: one takes 0.7 GB of a 1,024-wide model
CUDA = "CUDAExecutionProvider"
AWAKE_SECS = 0.0003  # until another thread helps, about
LATEST_SHARE = 0.1  # of the latest batch in what a token costs
SHIPPED_OUTPUTS = {
    "hidden": ("last_hidden_state", "token_embeddings", "hidden"),
    "sparse": ("sparse",),
    "scores": ("logits", "scores"),
}


class PaddedBatch(NamedTuple):
    """The rows of a batch, all int64 [rows, tokens], padded on the right to the longest. adapters: [rows]."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray
    adapters: np.ndarray


class Session(Protocol):
    """A loaded graph: named int64 arrays [rows, tokens] in, its only output out. Thread-safe.

    at_once: how many batches should be computed at the same time; on_cpu: whether on the cores of this machine;
    token_secs: of one thread for a token, lately, and not less; infinite where that is not known.
    """

    at_once: int
    on_cpu: bool
    token_secs: float

    def run(self, feed: dict[str, np.ndarray], alone: bool, pooling: str | None) -> np.ndarray:
        """alone: while no other batch is computed on this machine. pooling: what of the hidden states is wanted; a
        session that computes elsewhere may return [rows, width] of it."""


class OnnxSession:
    """onnxruntime on a built graph (bytes, and the folder that holds its weights) or on a model.onnx (its path).

    A lone row is computed on all threads. With side_by_side, a batch of several rows is computed on one thread, and as
    many such batches run at once as there are threads. On two threads, the halves of each operator wait for each other
    some hundred times a batch; with one thread each, 2 cores computed 1.4 times the texts a second. The session for
    lone rows keeps a packed copy of the weights; the one for several rows reads them from the mapped file, and needs
    memory only for its batches.

    spin: whether there is a session, too, for a row that is alone on this machine. Its threads wait for each other
    awake, while it runs: a short text takes 0.7 of the time, and less CPU. Beside others that compute it takes longer,
    as they do. It reads the mapped file, too. A row that would be there before another thread is awake goes to the
    session for several rows, where that is another one.
    """

    def __init__(
        self,
        model: bytes | str,
        folder: Path | None,
        threads: int,
        side_by_side: bool,
        outputs: Sequence[str],
        spin: bool = False,
    ) -> None:
        self.token_secs = math.inf
        self.threads = threads
        self.alone = self.lone = self.several = onnx_session(model, folder, threads, packed=True)
        self.on_cpu = len(self.lone.get_providers()) == 1
        if spin and self.on_cpu:  # on a GPU it would hold the weights once more
            self.alone = onnx_session(model, folder, threads, packed=False, spin=True)
        self.at_once = 1 if not self.on_cpu or not side_by_side else min(threads, MOST_AT_ONCE)
        if self.at_once > 1 and folder:  # a second session of a model.onnx would hold its weights once more
            self.several = onnx_session(model, folder, 1, packed=False)
        self.inputs = [value.name for value in self.lone.get_inputs()]
        names = [value.name for value in self.lone.get_outputs()]
        self.output = next(name for name in (*outputs, *names) if name in names)
        if self.output == "logits" and "last_hidden_state" in outputs:
            raise invalid("The graph has logits, and no hidden states to pool", "UNSUPPORTED_MODEL")
        self.output_rank = len(self.lone.get_outputs()[names.index(self.output)].shape)

    def run(self, feed: dict[str, np.ndarray], alone: bool, pooling: str | None) -> np.ndarray:
        first = next(iter(feed.values()))
        lone = self.alone if alone else self.lone
        session = lone if len(first) == 1 and first.size * self.token_secs > AWAKE_SECS else self.several
        began = time.thread_time()
        output: np.ndarray = session.run([self.output], {name: feed[name] for name in self.inputs})[0]
        if self.on_cpu and first.ndim == 2:  # else a GPU computes, or these are images
            # The others do no more than this one, which asks them.
            threads = 1 if session is not self.lone and session is not self.alone else self.threads
            self.note_cost(threads * (time.thread_time() - began) / first.size)
        return output

    def note_cost(self, token_secs: float) -> None:
        """Of a batch. Threads that do so at once may lose one: it is an estimate."""
        if token_secs <= 0:  # the clock of this machine has not moved meanwhile
            return
        if math.isinf(self.token_secs):
            self.token_secs = token_secs
        else:
            self.token_secs += LATEST_SHARE * (token_secs - self.token_secs)


def onnx_session(
    model: bytes | str, folder: Path | None, threads: int, packed: bool, spin: bool = False
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # The spinning threads of several engines take each other's cores: four engines lost half their throughput. So they
    # spin within a call alone, and only where all cores are leased.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.force_spinning_stop", str(int(spin)))
    options.add_session_config_entry("session.disable_prepacking", "0" if packed else "1")
    # Without it CPUs with AVX2 or AVX512 and no VNNI cut sums of two products of whole numbers to 16 bits (1.31).
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.enable_mem_pattern = False  # it keeps a plan for each shape that it ever saw, and is no faster
    options.log_severity_level = 3
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(model, options, providers=providers())


def providers() -> list[tuple[str, dict[str, str]]]:
    """CUDA if onnxruntime was installed with it, then the CPU."""
    chosen: list[tuple[str, dict[str, str]]] = [("CPUExecutionProvider", {})]
    if CUDA in onnxruntime.get_available_providers():
        onnxruntime.preload_dlls()  # NVIDIA's libraries, where they are Python packages; others are found anyway
        chosen.insert(0, (CUDA, {"use_tf32": "0"}))  # its products have 10 bits of each factor
    return chosen


def gpus_wanted() -> str:
    """The GPUs that this process was given; empty for none."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return "" if wanted.startswith("-") else wanted


class Runtime:
    """The sessions of one model. `run` may be called from several threads.

    name: one of RUNTIMES; dtype: None for the runtime's default; side_by_side: whether several batches may be computed
    at once; spin: see OnnxSession.
    """

    def __init__(
        self,
        card: Card,
        graphs: Path,
        threads: int,
        name: str,
        dtype: str | None,
        side_by_side: bool = True,
        spin: bool = False,
    ) -> None:
        self.head = self.head_of(card)
        refuse_unfit_runtime(name, card)
        refuse_missing_runtime(name)
        self.name, self.dtype = name, chosen_dtype(name, dtype)
        self.card, self.graphs, self.threads, self.side_by_side, self.spin = card, graphs, threads, side_by_side, spin
        self.shipped = shipped_graph(card, self.dtype)
        self.lock = threading.Lock()
        self.long_permits = threading.BoundedSemaphore(LONG_AT_ONCE)
        self.sessions: dict[bool, Session] = {}
        self.at_once = self.session(long=False).at_once  # how many threads should call `run`
        self.on_cpu = self.session(long=False).on_cpu
        if self.on_cpu and (wanted := gpus_wanted()):
            log.warning(
                "%s computes on the CPU though CUDA_VISIBLE_DEVICES=%s names a GPU: "
                'give the instance "extra_args": ["--runtime", "torch"], or install onnxruntime-gpu',
                name,
                wanted,
            )

    def head_of(self, card: Card) -> str:
        return HEADS[card.task]

    @cached_property
    def long_graph(self) -> bool:
        """Whether long rows have a graph of their own."""
        if self.name != "onnxruntime" or self.shipped:
            return False
        return architecture_of(self.card.config).attention.relative in (None, "alibi")

    def batch(self, encodings: list[Any]) -> Any:
        """What `run` takes, of some texts."""
        return padded(encodings, self.card)

    def run(self, batch: Any, alone: bool = False, pooling: str | None = None) -> np.ndarray:
        """One forward pass. The result is float32, in the shape that `graph.build` says, or [rows, width] of what
        ``pooling`` names, which is what alone is wanted of hidden states.

        alone: while no other batch is computed on this machine.
        """
        feed, (rows, tokens) = batch._asdict(), batch.input_ids.shape
        if self.long_graph and rows == 1 and tokens > LONG_TOKENS:
            with self.long_permits:
                return self.session(long=True).run(feed, alone, pooling)
        return self.session(long=False).run(feed, alone, pooling)

    @property
    def token_secs(self) -> float:
        """As of its session. It takes no lock, beneath which another one may be loaded."""
        return self.sessions[False].token_secs

    def session(self, long: bool) -> Session:
        if loaded := self.sessions.get(long):  # short rows do not wait for the load of the session for long ones
            return loaded
        with self.lock:
            if long not in self.sessions:
                try:
                    self.sessions[long] = self.load(long)
                except Problem:
                    raise
                except Exception as error:  # the C++ exceptions of the runtimes have no common base class
                    raise invalid(
                        f"{self.name} cannot load {self.card.folder}: {error}", "UNSUPPORTED_MODEL"
                    ) from error
            return self.sessions[long]

    def load(self, long: bool) -> Session:
        if self.name == "torch":
            from appliance.engine import torch

            return torch.TorchSession(self.card, self.head, self.threads, self.dtype)
        if self.shipped and self.name == "onnxruntime":
            # Not what a link leads to: its weights lie beside the link, under their own name.
            session = OnnxSession(str(self.shipped), None, self.threads, self.side_by_side, SHIPPED_OUTPUTS[self.head])
            if self.head == "sparse" and session.output_rank != 2:
                raise no_sparse_output(self.shipped)
            return session
        tensors = self.tensors()
        folder = next(iter(tensors.values())).file.parent
        graph = self.graph(tensors, long)
        if self.name == "openvino":
            from appliance.engine import openvino

            streams = self.threads if self.side_by_side else 1
            return openvino.OpenVinoSession(graph, folder, self.threads, streams, bfloat16=self.dtype == "bfloat16")
        side_by_side, spin = self.side_by_side and not long, self.spin and not long
        return OnnxSession(graph, folder, self.threads, side_by_side, (self.head,), spin)

    def tensors(self) -> dict[str, Tensor]:
        if not any((self.card.folder / name).exists() for name in WEIGHTS):
            raise invalid(
                f"{self.card.folder} has neither model.safetensors nor onnx/model.onnx: convert it to one of these"
            )
        return tensors_of(self.card.folder)

    def graph(self, tensors: dict[str, Tensor], long: bool) -> bytes:
        """The built graph: from the data folder if there is one, else built now."""
        key = graph_key(self.card, tensors, self.head, long, f"{self.name} {self.dtype}", weights=self.dtype == "int8")
        if content := kept_graph(self.graphs, key):
            return content
        content = self.build(tensors, long)
        try:
            keep_graph(self.graphs, key, content)
        except OSError as error:
            log.warning("Cannot keep the graph in %s (%s); it is built again at the next start", self.graphs, error)
        return content

    def build(self, tensors: dict[str, Tensor], long: bool) -> bytes:
        from appliance.engine import graph  # only now: it imports onnx, which takes 0.2 s and 30 MB
        from appliance.engine.graph.nodes import GraphOptions

        options = GraphOptions(long, plain=self.name == "openvino", int8=self.dtype == "int8")
        model = graph.build(self.card.config, tensors, self.head, options)
        if model.ByteSize() > LARGEST_GRAPH:
            raise invalid(f"The model has {model.ByteSize()} bytes as int8, and a graph ends at {LARGEST_GRAPH}")
        content: bytes = model.SerializeToString()
        return content


class ImageRuntime(Runtime):
    """The session of the images of a model that takes them."""

    long_graph = False

    def head_of(self, card: Card) -> str:
        return "images"

    def batch(self, encodings: list[Any]) -> np.ndarray:
        """[images, 3, height, width]"""
        return np.stack([each.values for each in encodings])

    def run(self, batch: np.ndarray, alone: bool = False, pooling: str | None = None) -> np.ndarray:
        return self.session(long=False).run({"pixels": batch}, alone, pooling)

    def build(self, tensors: dict[str, Tensor], long: bool) -> bytes:
        from appliance.engine.graph import images  # only now, as above

        content: bytes = images.build(self.card.config, tensors, int8=self.dtype == "int8").SerializeToString()
        return content


def no_sparse_output(graph: Path) -> Problem:
    words = f"{graph} has logits for each token, and no output `sparse` [texts, vocabulary]"
    return invalid(f"{words}: add model.safetensors, from which such a graph is built", "UNSUPPORTED_MODEL")


def threads_for(engines: int, cores: int) -> int:
    """Threads of one engine where the cores are divided: all of them together have as many as there are cores."""
    return max(1, cores // max(1, engines))


def padded(encodings: list[Any], card: Card) -> PaddedBatch:
    longest = max(len(encoding) for encoding in encodings)
    ids = np.full((len(encodings), longest), card.pad_id, np.int64)
    mask = np.zeros_like(ids)
    types = np.zeros_like(ids)
    adapters = np.array([getattr(encoding, "adapter", NO_ADAPTER) for encoding in encodings], np.int64)
    unseen = card.multivector is not None and card.multivector.hides_filling
    for row, encoding in enumerate(encodings):
        length = len(encoding)
        ids[row, :length] = encoding.ids
        mask[row, :length] = 1
        if card.has_token_types:
            types[row, :length] = encoding.type_ids
        if unseen:
            mask[row, :length] = encoding.attention_mask
    return PaddedBatch(ids, mask, types, adapters)
