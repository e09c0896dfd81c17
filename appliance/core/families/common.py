"""What the families share: refusals, and the keys of config.json that several of them have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.core.problems import Kind, Problem, quoted

Config = Mapping[str, Any]
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "swish", "tanh")


def unsupported(what: str) -> Problem:
    return Problem(
        Kind.INVALID,
        "UNSUPPORTED_MODEL",
        f"The embedded engine cannot build {what}. docs/models.md has the families that it builds; for others use a "
        "folder with onnx/model.onnx, --runtime torch, or install the TEI binary (text-embeddings-router)",
    )


def architecture_name(config: Config) -> str:
    return str((config.get("architectures") or ["?"])[0])


def activation_of(config: Config, *keys: str, default: str = "gelu") -> str:
    """The activation under the first of ``keys`` that the configuration has. Raises: Problem for an unknown one."""
    activation = next((str(config[key]) for key in keys if config.get(key)), default)
    if activation not in ACTIVATIONS:
        raise unsupported(f"the activation {quoted(activation)} of {architecture_name(config)}")
    return activation


def require(config: Config, key: str, *allowed: Any) -> None:
    """Raises: Problem unless the configuration lacks ``key`` or has one of the allowed values."""
    if key in config and config[key] is not None and config[key] not in allowed:
        raise unsupported(f"{key} {quoted(str(config[key]))} of {architecture_name(config)}")


def first_position(config: Config) -> int:
    """Where RoBERTa and its relatives begin to count positions; transformers takes 1 for padding that is not named."""
    padding = config.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1


class Rope(NamedTuple):
    """theta: base of the rotary positions; stretch: divides their frequencies."""

    theta: float
    stretch: float = 1.0


def rope_of(config: Config, theta: float, head_size: int, kind: str = "") -> Rope:
    """The rotary positions, in transformers 5's spelling (`rope_parameters`) or the older (`rope_theta`,
    `rope_scaling`).

    theta: the family's default; kind: `full_attention` or `sliding_attention` where a model has both. `linear` divides
    the positions; `ntk`, of the GTE models, raises the base by its factor and divides by factor^(2/size).
    Raises: Problem for other ways of scaling.
    """
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get(kind) or (parameters if "rope_theta" in parameters else {})
    scaling = (None if kind == "sliding_attention" else config.get("rope_scaling")) or parameters
    base = float(parameters.get("rope_theta") or config.get("rope_theta") or theta)
    how = scaling.get("rope_type", scaling.get("type", "default"))
    factor = float(scaling.get("factor") or 1.0)
    if how == "default" or factor == 1.0:
        return Rope(base)
    if how == "linear":
        return Rope(base, factor)
    if how == "ntk":
        return Rope(base * factor, factor ** (2 / head_size))
    raise unsupported(f"{how} rotary positions of {architecture_name(config)}")
