"""transformers on torch, where they are installed (extra `torch`) and asked for with `--runtime torch`.

It serves every architecture that the graph builder does not cover, and GPUs. Code from a model's folder never runs.
"""

from __future__ import annotations

import math
import threading
from functools import partial

import numpy as np
import torch
import transformers

from appliance.core.problems import invalid
from appliance.drivers.modelfolder import Card
from appliance.engine.cuda_graphs import CudaGraphs
from appliance.engine.runtime import gpus_wanted

CLASSES = {
    "hidden": "AutoModel",
    "sparse": "AutoModelForMaskedLM",
    "scores": "AutoModelForSequenceClassification",
}
GPU_BATCHES = 2  # while the GPU computes one, the next one is made
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchSession:
    """One model on the GPU if torch has one, else on ``threads`` threads of the CPU."""

    token_secs = math.inf

    def __init__(self, card: Card, head: str, threads: int, dtype: str) -> None:
        # With as many threads as cores in every process, four engines together were seven times slower than one.
        torch.set_num_threads(threads)
        self.head = head
        self.device = device()
        self.on_cpu = self.device == "cpu"
        self.at_once = 1 if self.on_cpu else GPU_BATCHES
        kind = getattr(transformers, CLASSES[head])
        try:
            model, told = kind.from_pretrained(
                card.folder,
                dtype=DTYPES[dtype],
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise invalid(f"transformers cannot load {card.folder}: {error}", "UNSUPPORTED_MODEL") from error
        unused = "pooler" if head in ("hidden", "sparse") else None
        if lacking := sorted(name for name in told["missing_keys"] if not (unused and unused in name)):
            # They would be random numbers, and others in each replica.
            words = f"transformers finds no weights for {len(lacking)} tensors of its own model, such as {lacking[0]}"
            raise invalid(f"{words}: leave --runtime torch out", "UNSUPPORTED_MODEL")
        self.model = model.to(self.device).eval()
        self.lock = threading.Lock()
        self.graphs: dict[str | None, CudaGraphs] = {}  # by pooling
        self.words = self.model.get_input_embeddings().num_embeddings
        # A model without token types refuses them as an input.
        self.inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if card.has_token_types else [])]
        if self.is_recorded(pooling := card.pooling if card.task == "embedding" else None):
            self.graphs_for(pooling).record_first()

    def run(self, feed: dict[str, np.ndarray], alone: bool, pooling: str | None) -> np.ndarray:
        if (largest := int(feed["input_ids"].max())) >= self.words:  # a GPU would be lost with it, and this process
            raise ValueError(f"The token {largest} is none of the {self.words} that the model has")
        arrays = [feed[name] for name in self.inputs]
        try:
            if self.is_recorded(pooling):
                recorded = self.graphs_for(pooling).run(arrays, self.inputs.index("attention_mask"))
                if recorded is not None:
                    return recorded
            result: np.ndarray = self.output(torch.from_numpy(np.stack(arrays)).to(self.device), pooling).cpu().numpy()
        except torch.OutOfMemoryError as error:
            words = str(error).partition(". ")[0]
        else:
            return result
        # Outside of the block, with whose exception the tensors of the batch would live on.
        raise MemoryError(words)

    def is_recorded(self, pooling: str | None) -> bool:
        """Not where the output is large: each recording keeps its own."""
        return not self.on_cpu and (self.head == "scores" or (self.head == "hidden" and pooling is not None))

    def graphs_for(self, pooling: str | None) -> CudaGraphs:
        with self.lock:
            if pooling not in self.graphs:
                self.graphs[pooling] = CudaGraphs(partial(self.output, pooling=pooling), len(self.inputs))
            return self.graphs[pooling]

    def output(self, inputs: torch.Tensor, pooling: str | None) -> torch.Tensor:
        """[inputs, rows, tokens] to float32 in the shape that `Session.run` says."""
        named = dict(zip(self.inputs, inputs, strict=True))
        with torch.inference_mode():
            mask, outputs = named["attention_mask"], self.model(**named)
            if self.head == "scores":
                scores: torch.Tensor = outputs.logits.float()
                return scores
            if self.head == "sparse":
                masked = outputs.logits.masked_fill(mask[:, :, None] == 0, float("-inf"))
                return torch.log1p(torch.relu(masked.max(dim=1).values)).float()
            hidden: torch.Tensor = outputs.last_hidden_state
            return (pooled(hidden, mask, pooling) if pooling else hidden).float()


def device() -> str:
    """Raises: Problem where there shall be a GPU and torch has none: on the CPU it would only seem to work."""
    if torch.cuda.is_available():
        return "cuda"
    if wanted := gpus_wanted():
        words = f"torch {torch.__version__} has no GPU, and CUDA_VISIBLE_DEVICES={wanted} names one"
        raise invalid(f"{words}: install a torch with CUDA for this driver, or leave the GPU out", "UNSUPPORTED_MODEL")
    return "cpu"


def pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """[rows, tokens, width] to [rows, width] on the device: hidden states are some hundred times larger to fetch."""
    if pooling == "cls":
        return hidden[:, 0]
    lengths = mask.sum(dim=1)
    if pooling == "last-token":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    return (hidden.float() * mask[:, :, None]).sum(dim=1) / lengths[:, None]
