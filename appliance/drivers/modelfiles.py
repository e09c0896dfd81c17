"""The files of a model in its folder: which serving needs, whether all are there, and what config.json says."""

from __future__ import annotations

import json
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core import models

LONGEST_HEADER = 100 * 1024 * 1024  # safetensors' own limit
NUMBERS = {
    "hidden_size": ("hidden_size", "d_model", "dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "layers": ("num_hidden_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_heads"),
}


@dataclass(frozen=True)
class File:
    """One file that serving needs. ``name`` is relative to the folder; sizes in bytes."""

    name: str
    size: int
    mtime_ns: int


def serving_files(folder: Path) -> list[File]:
    """The files that serving may read, sorted by name; a link whose target is gone is none.

    A model may be deleted meanwhile: what is gone is not listed.
    """
    found = []
    top = listed(folder)
    for path in sorted([*top, *(path for each in top if each.is_dir() for path in listed(each))]):
        name = path.relative_to(folder).as_posix()
        if not models.wanted(name):
            continue
        try:
            seen = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(seen.st_mode):
            found.append(File(name, seen.st_size, seen.st_mtime_ns))
    return found


def listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing, when it is gone, is none, or is closed to us."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def missing(folder: Path) -> list[str]:
    """Names of files without which the folder cannot be served; empty: it is complete."""
    names = [file.name for file in serving_files(folder) if file.size]
    index = read_json(folder / "model.safetensors.index.json") or {}
    shards = sorted(set((index.get("weight_map") or {}).values())) if isinstance(index, dict) else []
    modules = read_json(folder / "modules.json") or []
    kinds = [(str(one.get("path", "")), str(one.get("type", ""))) for one in modules if isinstance(one, dict)]
    # Normalize has no files, and the transformer itself is the folder.
    return models.missing(names, shards, [path for path, kind in kinds if path and not kind.endswith(".Normalize")])


def metadata(folder: Path) -> dict[str, Any] | None:
    """What config.json and the weights' own headers tell; None without a readable config.json."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        return None
    told: dict[str, Any] = {"model_type": config.get("model_type"), "architectures": config.get("architectures") or []}
    for key, spellings in NUMBERS.items():
        found = [config[each] for each in spellings if isinstance(config.get(each), int)]
        told[key] = found[0] if found else None
    return told | {"parameters": parameters(folder), "task": task(folder, config)}


def task(folder: Path, config: dict[str, Any]) -> str:
    """dense, sparse, reranker or classifier, by TEI's rules; a masked language model alone may be either of the first.

    Whether one is sparse is decided by the pooling of its instance; here by sentence-transformers' module.
    """
    architectures = [str(name) for name in config.get("architectures") or []]
    if any(name.endswith("Classification") for name in architectures):
        return "reranker" if len(config.get("id2label") or {}) == 1 else "classifier"
    modules = read_json(folder / "modules.json") or []
    sparse = any("SpladePooling" in str(one.get("type", "")) for one in modules if isinstance(one, dict))
    return "sparse" if sparse else "dense"


def parameters(folder: Path) -> int | None:
    """How many numbers the safetensors have, counted from their headers."""
    total = 0
    for path in listed(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= LONGEST_HEADER else {}
        except (OSError, ValueError, struct.error):
            return None
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        total += sum(product(shape) for shape in shapes)
    return total or None


def product(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def read_json(path: Path) -> Any:
    """None for a file that is not there or not JSON: then it tells nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
