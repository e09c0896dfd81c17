"""The runtimes of the embedded engine, and the dtypes that each computes in."""

from __future__ import annotations

from appliance.core.problems import invalid

RUNTIMES = ("onnxruntime", "openvino", "torch")
# The dtypes that each runtime can compute in, its default first; float16 is for GPUs. int8: of the layers' weights.
DTYPES = {
    "onnxruntime": ("float32", "int8"),
    "openvino": ("float32", "bfloat16"),
    "torch": ("float32", "bfloat16", "float16"),
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # of which graphs are built
SHIPPED = ("model.onnx", "onnx/model.onnx")  # a graph that came with the model, which onnxruntime takes as it is


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
