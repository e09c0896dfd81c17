"""Which models the embedded engine can serve, as far as their configuration tells: runtimes, dtypes, architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.core.families import FAMILIES
from appliance.core.problems import Kind, Problem, invalid

RUNTIMES = ("onnxruntime", "openvino", "torch")
# The dtypes that each runtime can compute in, its default first; float16 is for GPUs.
DTYPES = {
    "onnxruntime": ("float32",),
    "openvino": ("float32", "bfloat16"),
    "torch": ("float32", "bfloat16", "float16"),
}
SHIPPED = ("model.onnx", "onnx/model.onnx")  # a graph that came with the model, which onnxruntime takes as it is
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # and the approximation of each
ACTIVATIONS = (*GELU, "relu")


def unsupported(what: str) -> Problem:
    return Problem(
        Kind.INVALID,
        "UNSUPPORTED_MODEL",
        f"The embedded engine cannot build {what}. It builds {', '.join(FAMILIES)} models with absolute positions; for "
        "others use a folder with onnx/model.onnx, or install the TEI binary (text-embeddings-router)",
    )


def chosen_dtype(runtime: str, asked: str | None) -> str:
    """The dtype to compute in. Raises: Problem when the runtime cannot compute in ``asked``."""
    dtype = asked or DTYPES[runtime][0]
    if dtype not in DTYPES[runtime]:
        able = [name for name in RUNTIMES if dtype in DTYPES[name]]
        raise invalid(
            f"{runtime} computes in {', '.join(DTYPES[runtime])}, not {dtype}: use --runtime {' or '.join(able)}",
            "UNSUPPORTED_MODEL",
        )
    return dtype


def refuse_unbuildable(config: Mapping[str, Any]) -> None:
    """config: of config.json. Raises: Problem unless the engine can build the graph of such a model."""
    architecture, kind = config["architectures"][0], config["model_type"]
    if kind not in FAMILIES:
        raise unsupported(f"{architecture} (model type {kind})")
    if (activation := activation_of(config)) not in ACTIVATIONS:
        raise unsupported(f'the activation "{activation}" of {architecture}')
    if (positions := config.get("position_embedding_type", "absolute")) != "absolute":
        raise unsupported(f"{positions} positions of {architecture}")


def activation_of(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_act", config.get("activation", "gelu")))
