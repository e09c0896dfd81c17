"""The modules of sentence-transformers, as modules.json lists them: which are computed here, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.core.problems import Kind, Problem, quoted

# By the last part of their type; those of PyLate are its own.
COMPUTED = {
    *("Transformer", "MLMTransformer", "CLIPModel", "StaticEmbedding", "Pooling", "SpladePooling", "Dense", "Dropout"),
    *("Normalize", "LogitScore", "MultiVectorMask"),
}
ORDER = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}  # of models with one vector for each text


def refuse_unknown(file: str, modules: Sequence[dict[str, Any]]) -> None:
    """Raises: Problem for a module that would change the vectors, and that nobody computes here, or not there."""
    types = [str(module["type"]) for module in modules]
    kinds = [each.rpartition(".")[2] for each in types]
    is_pylate = [each.startswith("pylate.") for each in types]
    for name, kind, is_known in zip(types, kinds, is_pylate, strict=True):
        if not is_known and kind not in COMPUTED:
            raise Problem(Kind.INVALID, "UNSUPPORTED_MODEL", f"{file} has a module {quoted(name)}")
    order = [ORDER[kind] for kind in kinds if kind in ORDER]
    if order != sorted(order) and not any(is_pylate) and "MultiVectorMask" not in kinds:
        words = f"{file} has its modules in an order that is not computed here: {', '.join(kinds)}"
        raise Problem(Kind.INVALID, "UNSUPPORTED_MODEL", words)


def pooling_folder(modules: Sequence[dict[str, Any]]) -> str:
    """The folder of the pooling's configuration, beneath that of the model."""
    paths = [str(module.get("path") or "") for module in modules if str(module["type"]).endswith(".Pooling")]
    return paths[0] if paths and paths[0] else "1_Pooling"
