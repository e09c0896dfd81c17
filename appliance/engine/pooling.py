"""From a model's output to TEI's answer: pooling, Dense layers, normalisation, scores, labels. All float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from appliance.core.families.images import text_projection
from appliance.core.problems import invalid
from appliance.drivers.modelfolder import Card, DenseModule
from appliance.engine.weights import read_float32, tensors_of

LEAST_LENGTH = 1 / float(np.finfo(np.float32).max)  # else float32 has no number to multiply a vector with


@dataclass(frozen=True)
class DenseLayer:
    """A Dense module: x @ weight.T + bias, then its activation, then + x @ residual.T."""

    weight: np.ndarray
    bias: np.ndarray | None
    tanh: bool
    residual: np.ndarray | None = None


def dense_layers(card: Card) -> list[DenseLayer]:
    """Of its modules, or the projection of the texts of a model that takes images."""
    if card.images:
        layer, own = text_projection(card.config), tensors_of(card.folder)
        bias = read_float32(own[f"{layer.name}.bias"]) if layer.bias else None
        return [DenseLayer(read_float32(own[f"{layer.name}.weight"]), bias, tanh=False)]
    return [dense_layer(dense) for dense in card.dense]


def dense_layer(dense: DenseModule) -> DenseLayer:
    """Raises: Problem when its file lacks a tensor."""
    tensors = {name: read_float32(tensor) for name, tensor in tensors_of(dense.folder).items()}
    for name in ("linear.weight", *(["linear.bias"] if dense.bias else [])):
        if name not in tensors:
            raise invalid(f"{dense.folder} has no {name}", "UNSUPPORTED_MODEL")
    residual = residual_of(dense, tensors) if dense.residual else None
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), dense.activation == "Tanh", residual)


def residual_of(dense: DenseModule, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What the input is multiplied with before it is added: nothing, where input and output have the same width."""
    if "residual.weight" in tensors:
        return tensors["residual.weight"]
    rows, width = tensors["linear.weight"].shape
    if rows != width:
        raise invalid(f"{dense.folder} has no residual.weight to add {width} numbers to {rows}", "UNSUPPORTED_MODEL")
    return np.eye(width, dtype=np.float32)


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
        before, vector = vector, layer.weight @ vector
        if layer.bias is not None:
            vector = vector + (layer.bias if vector.ndim == 1 else layer.bias[:, np.newaxis])
        if layer.tanh:
            vector = np.tanh(vector)
        if layer.residual is not None:
            vector = vector + layer.residual @ before
    return vector


def normalized(vector: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1; the sum of squares is in float64, as TEI's.

    Raises: ArithmeticError for a vector that is shorter than LEAST_LENGTH, as one of zeros is, or with a value that is
    no finite number.
    """
    wide = vector.astype(np.float64)
    squares = float(wide.dot(wide))
    if not LEAST_LENGTH**2 < squares < math.inf:  # of float32 it is neither too small nor too large for float64
        raise ArithmeticError(squares)
    return vector * np.float32(1.0 / math.sqrt(squares))


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
