"""The files of a model in its folder: which serving needs, whether all are there, and what config.json says.

A folder is somebody else's work: whatever is wrong with it is told by `wrong`, and everything else goes on without it.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core import models

LONGEST_HEADER = 100 * 1024 * 1024  # safetensors' own limit
LONGEST_JSON = 16 * 1024 * 1024
MOST_PARAMETERS = 2**63
INDEX, MODULES, CONFIG = "model.safetensors.index.json", "modules.json", "config.json"
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
    for path in sorted([*top, *(path for each in top for path in listed(each))]):
        name = path.relative_to(folder).as_posix()
        if not models.wanted(name):
            continue
        try:
            seen = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(seen.st_mode):
            found.append(File(name, seen.st_size, seen.st_mtime_ns))
    return found


def listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing, when it is gone, is none, or is closed to us."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def missing(folder: Path) -> list[str]:
    """Names of files without which the folder cannot be served; empty: it is complete."""
    names = [file.name for file in serving_files(folder) if file.size]
    weights = found(folder / INDEX, {}).get("weight_map")
    shards = {name for name in weights.values() if isinstance(name, str)} if isinstance(weights, dict) else set()
    modules = [one for one in found(folder / MODULES, []) if isinstance(one, dict)]
    kinds = [(str(one.get("path", "")), str(one.get("type", ""))) for one in modules]
    # Normalize has no files, and the transformer itself is the folder.
    parts = [path for path, kind in kinds if path and not kind.endswith(".Normalize")]
    return models.missing(names, sorted(shards), parts)


def wrong(folder: Path) -> str:
    """Which of the files that describe a model does not, and why; empty when all do that are there."""
    for name, kind in ((CONFIG, dict), (MODULES, list), (INDEX, dict)):
        try:
            parsed(folder / name, kind)
        except ValueError as error:
            return f"{name} {error}"
    config = found(folder / CONFIG, {})
    if not isinstance(config.get("model_type", ""), str):
        return f'{CONFIG} has a "model_type" that is no name'
    return "" if architectures(config) is not None else f'{CONFIG} has "architectures" that are no list of names'


def metadata(folder: Path) -> dict[str, Any] | None:
    """What config.json and the weights' own headers tell; None without a readable config.json."""
    config = found(folder / CONFIG, {})
    if not config:
        return None
    model_type = config.get("model_type")
    told: dict[str, Any] = {
        "model_type": model_type if isinstance(model_type, str) else None,
        "architectures": architectures(config) or [],
    }
    for key, spellings in NUMBERS.items():
        numbers = [config[each] for each in spellings if isinstance(config.get(each), int)]
        told[key] = numbers[0] if numbers else None
    return told | {"parameters": parameters(folder), "task": task(folder, config)}


def architectures(config: dict[str, Any]) -> list[str] | None:
    """None for what is no list of names."""
    named = config.get("architectures") or []
    return named if isinstance(named, list) and all(isinstance(name, str) for name in named) else None


def task(folder: Path, config: dict[str, Any]) -> str:
    """dense, sparse, reranker or classifier, by TEI's rules; a masked language model alone may be either of the first.

    Whether one is sparse is decided by the pooling of its instance; here by sentence-transformers' module.
    """
    labels = config.get("id2label")
    if any(name.endswith("Classification") for name in architectures(config) or []):
        return "reranker" if isinstance(labels, dict) and len(labels) == 1 else "classifier"
    modules = found(folder / MODULES, [])
    sparse = any("SpladePooling" in str(one.get("type", "")) for one in modules if isinstance(one, dict))
    return "sparse" if sparse else "dense"


def parameters(folder: Path) -> int | None:
    """How many numbers the safetensors have, counted from their headers."""
    total = 0
    for path in listed(folder):
        if path.suffix == ".safetensors":
            try:
                total += counted(path)
            except (OSError, ValueError, RecursionError, struct.error):
                return None
    return total if 0 < total < MOST_PARAMETERS else None


def counted(path: Path) -> int:
    """Raises: OSError, ValueError, RecursionError or struct.error for what are no safetensors."""
    with open(path, "rb", opener=unblocked) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length)) if length <= LONGEST_HEADER else {}
    if not isinstance(header, dict):
        raise ValueError("no header")
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    shapes: list[Any] = [entry.get("shape") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(shape, list) and all(isinstance(size, int) for size in shape) for shape in shapes):
        raise ValueError("no shapes")
    return sum(math.prod(shape) for shape in shapes)


def found(path: Path, nothing: Any) -> Any:
    """What a file holds, of the kind of ``nothing``; which it is where that cannot be told."""
    try:
        return parsed(path, type(nothing)) or nothing
    except ValueError:
        return nothing


def parsed(path: Path, kind: type) -> Any:
    """The object or list in a file; None where there is no file. Raises: ValueError with what is wrong with it."""
    try:
        with open(path, "rb", opener=unblocked) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("is no regular file")
            text = file.read(LONGEST_JSON + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(text) > LONGEST_JSON:
        raise ValueError(f"has over {LONGEST_JSON // 1024 // 1024} MiB")
    try:
        told = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(told, kind):
        raise ValueError(f"is no {'object' if kind is dict else 'list'}")
    return told


def unblocked(path: str, flags: int) -> int:
    """Opening a pipe would wait for who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
