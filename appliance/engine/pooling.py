"""From a model's output to TEI's answer: pooling, Dense layers, normalisation, scores, labels. All float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from appliance.core.families.images import text_projection
from appliance.drivers.modelfolder import Card
from appliance.engine.weights import read_float32, tensors_of


@dataclass(frozen=True)
class DenseLayer:
    """A Dense module: x @ weight.T + bias, then its activation."""

    weight: np.ndarray
    bias: np.ndarray | None
    tanh: bool


def dense_layers(card: Card) -> list[DenseLayer]:
    """Of its modules, or the projection of the texts of a model that takes images."""
    if card.images:
        layer, own = text_projection(card.config), tensors_of(card.folder)
        bias = read_float32(own[f"{layer.name}.bias"]) if layer.bias else None
        return [DenseLayer(read_float32(own[f"{layer.name}.weight"]), bias, tanh=False)]
    layers = []
    for dense in card.dense:
        tensors = {name: read_float32(tensor) for name, tensor in tensors_of(dense.folder).items()}
        bias = tensors["linear.bias"] if dense.bias else None
        layers.append(DenseLayer(tensors["linear.weight"], bias, dense.activation == "Tanh"))
    return layers


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    """[tokens, width] of one text, without padding, to [width]."""
    if pooling == "cls":
        return hidden[0]
    if pooling == "last-token":
        return hidden[-1]
    mean: np.ndarray = hidden.mean(axis=0, dtype=np.float32)
    return mean


def projected(vector: np.ndarray, layers: list[DenseLayer]) -> np.ndarray:
    """[width] or [width, tokens] through all layers."""
    for layer in layers:
        vector = layer.weight @ vector
        if layer.bias is not None:
            vector = vector + (layer.bias if vector.ndim == 1 else layer.bias[:, np.newaxis])
        if layer.tanh:
            vector = np.tanh(vector)
    return vector


def normalized(vector: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1; the sum of squares is in float64, as TEI's. A zero vector has no answer."""
    length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    return vector * np.float32(1.0 / length)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """One score: sigmoid. Several: softmax, in the form that cannot overflow."""
    wide = scores.astype(np.float64)
    if len(wide) == 1:
        return (1.0 / (1.0 + np.exp(-wide))).astype(np.float32)
    raised = np.exp(wide - wide.max())
    return (raised / raised.sum()).astype(np.float32)


def descending(scores: np.ndarray) -> list[int]:
    """Positions by falling score; of equal ones the later first, as TEI's reversed stable sort gives them."""
    return [int(index) for index in np.argsort(scores, kind="stable")[::-1]]
