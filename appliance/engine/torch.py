"""transformers on torch, where they are installed (extra `torch`) and asked for with `--runtime torch`.

It serves every architecture that the graph builder does not cover, and GPUs. Code from a model's folder never runs.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers

from appliance.core.problems import invalid
from appliance.drivers.modelfolder import Card

CLASSES = {
    "hidden": "AutoModel",
    "sparse": "AutoModelForMaskedLM",
    "scores": "AutoModelForSequenceClassification",
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchSession:
    """One model on the GPU if torch has one, else on ``threads`` threads of the CPU."""

    at_once = 1

    def __init__(self, card: Card, head: str, threads: int, dtype: str) -> None:
        # With as many threads as cores in every process, four engines together were seven times slower than one.
        torch.set_num_threads(threads)
        self.head = head
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.on_cpu = self.device == "cpu"
        kind = getattr(transformers, CLASSES[head])
        try:
            model = kind.from_pretrained(
                card.folder, dtype=DTYPES[dtype], trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise invalid(f"transformers cannot load {card.folder}: {error}", "UNSUPPORTED_MODEL") from error
        self.model = model.to(self.device).eval()
        # A model without token types refuses them as an input.
        self.inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if card.has_token_types else [])]

    def run(self, feed: dict[str, np.ndarray], alone: bool) -> np.ndarray:
        inputs = {name: torch.from_numpy(feed[name]).to(self.device) for name in self.inputs}
        with torch.inference_mode():
            outputs = self.model(**inputs)
            if self.head == "hidden":
                output = outputs.last_hidden_state
            elif self.head == "scores":
                output = outputs.logits
            else:
                masked = outputs.logits.masked_fill(inputs["attention_mask"][:, :, None] == 0, float("-inf"))
                output = torch.log1p(torch.relu(masked.max(dim=1).values))
        result: np.ndarray = output.float().cpu().numpy()
        return result
