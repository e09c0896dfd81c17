"""The files of a model in its folder: which of them serving needs, whether all are there, and what config.json says.

Folders come from others and may be damaged: `wrong` names the fault, and all other functions work without the faulty
file.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core import models
from appliance.files.jsonfile import read_json
from appliance.files.opening import open_regular

LONGEST_HEADER = 100 * 1024 * 1024  # safetensors' own limit
MOST_PARAMETERS = 2**63
INDEX, MODULES, CONFIG = "model.safetensors.index.json", "modules.json", "config.json"
NUMBERS = {
    "hidden_size": ("hidden_size", "d_model", "dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "num_hidden_layers": ("num_hidden_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_heads"),
}


@dataclass(frozen=True)
class ModelFile:
    """One file that serving needs. ``name`` is relative to the folder; sizes in bytes."""

    name: str
    size: int
    mtime_ns: int


def serving_files(folder: Path) -> list[ModelFile]:
    """The files that serving may read, sorted by name. Dangling links are left out, and files that vanish meanwhile: a
    model may be deleted at any time."""
    files = []
    top = entries_of(folder)
    for path in sorted([*top, *(path for each in top for path in entries_of(each))]):
        name = path.relative_to(folder).as_posix()
        if not models.may_be_served(name):
            continue
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            files.append(ModelFile(name, status.st_size, status.st_mtime_ns))
    return files


def entries_of(folder: Path) -> list[Path]:
    """The entries of a folder; none when it is missing, is no folder, or may not be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def missing(folder: Path) -> list[str]:
    """The names of the files that are missing for serving; empty when the folder is complete."""
    names = [file.name for file in serving_files(folder) if file.size]
    weights = content(folder / INDEX, {}).get("weight_map")
    shards = {name for name in weights.values() if isinstance(name, str)} if isinstance(weights, dict) else set()
    modules = [one for one in content(folder / MODULES, []) if isinstance(one, dict)]
    kinds = [(str(one.get("path", "")), str(one.get("type", ""))) for one in modules]
    # Normalize has no files, and the transformer itself is the folder.
    parts = [path for path, kind in kinds if path and not kind.endswith(".Normalize")]
    return models.missing(names, sorted(shards), parts)


def wrong(folder: Path) -> str:
    """Which of the files that describe a model is faulty, and why; empty when none is."""
    for name, kind in ((CONFIG, dict), (MODULES, list), (INDEX, dict)):
        try:
            parsed(folder / name, kind)
        except ValueError as error:
            return f"{name} {error}"
    config = content(folder / CONFIG, {})
    if not isinstance(config.get("model_type", ""), str):
        return f'{CONFIG} has a "model_type" that is no name'
    return "" if architectures(config) is not None else f'{CONFIG} has "architectures" that are no list of names'


def metadata(folder: Path) -> dict[str, Any] | None:
    """What config.json and the headers of the weights say of a model; None without a readable config.json."""
    config = content(folder / CONFIG, {})
    if not config:
        return None
    model_type = config.get("model_type")
    about: dict[str, Any] = {
        "model_type": model_type if isinstance(model_type, str) else None,
        "architectures": architectures(config) or [],
    }
    for key, spellings in NUMBERS.items():
        numbers = [config[each] for each in spellings if isinstance(config.get(each), int)]
        about[key] = numbers[0] if numbers else None
    return about | {"parameters": parameters(folder), "task": task(folder, config)}


def architectures(config: dict[str, Any]) -> list[str] | None:
    """The names in "architectures"; None when it is no list of names."""
    names = config.get("architectures") or []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def task(folder: Path, config: dict[str, Any]) -> str:
    """dense, sparse, reranker or classifier, by TEI's rules.

    A masked language model is dense or sparse by the pooling of its instance; here it counts as sparse if
    sentence-transformers has a SPLADE module for it.
    """
    labels = config.get("id2label")
    if any(name.endswith("Classification") for name in architectures(config) or []):
        return "reranker" if isinstance(labels, dict) and len(labels) == 1 else "classifier"
    modules = content(folder / MODULES, [])
    sparse = any("SpladePooling" in str(one.get("type", "")) for one in modules if isinstance(one, dict))
    return "sparse" if sparse else "dense"


def parameters(folder: Path) -> int | None:
    """How many numbers the safetensors hold, by their headers; None when a header cannot be read."""
    total = 0
    for path in entries_of(folder):
        if path.suffix == ".safetensors":
            try:
                total += numbers_in(path)
            except (OSError, ValueError, RecursionError, struct.error):
                return None
    return total if 0 < total < MOST_PARAMETERS else None


def numbers_in(path: Path) -> int:
    """How many numbers one file holds. Raises: OSError, ValueError, RecursionError, struct.error for other files."""
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length)) if length <= LONGEST_HEADER else {}
    if not isinstance(header, dict):
        raise ValueError("no header")
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    shapes: list[Any] = [entry.get("shape") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(shape, list) and all(isinstance(size, int) for size in shape) for shape in shapes):
        raise ValueError("no shapes")
    return sum(math.prod(shape) for shape in shapes)


def content(path: Path, nothing: Any) -> Any:
    """The content of a file, of the same type as ``nothing``; ``nothing`` when the file is missing or faulty."""
    try:
        return parsed(path, type(nothing)) or nothing
    except ValueError:
        return nothing


def parsed(path: Path, kind: type) -> Any:
    """The object or list in a file; None when there is no file. Raises: ValueError with what is wrong with it."""
    value = read_json(path)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise ValueError(f"is no {'object' if kind is dict else 'list'}")
    return value
