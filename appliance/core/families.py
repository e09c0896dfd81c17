"""The families of encoders that the graph builder knows, and how each names its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """The names that a family gives to its tensors. layer: with {} for the number of the layer."""

    prefix: str
    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attended: str = "attention.output.dense"
    attended_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    # Classification head: dense, activation, output; the first token goes in.
    head: tuple[str, str, str] = ("classifier.dense", "Tanh", "classifier.out_proj")
    # Masked-language head: dense, norm, decoder weight (absent: the word embeddings), decoder bias.
    lm_head: tuple[str, str, str, str] = (
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.decoder.weight",
        "lm_head.bias",
    )


ROBERTA = TensorNames(prefix="roberta.")
FAMILIES = {
    "bert": TensorNames(
        prefix="bert.",
        head=("bert.pooler.dense", "Tanh", "classifier"),
        lm_head=(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder.weight",
            "cls.predictions.bias",
        ),
    ),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": TensorNames(
        prefix="distilbert.",
        layer="transformer.layer.{}.",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attended="attention.out_lin",
        attended_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        norm="output_layer_norm",
        head=("pre_classifier", "Relu", "classifier"),
        lm_head=("vocab_transform", "vocab_layer_norm", "vocab_projector.weight", "vocab_projector.bias"),
    ),
    "mpnet": TensorNames(
        prefix="mpnet.",
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attended="attention.attn.o",
        attended_norm="attention.LayerNorm",
    ),
}
