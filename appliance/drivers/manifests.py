"""Manifests: what the files of a model were when they were proved, so that other files never start.

A manifest is made where every digest was compared with the hub's, or, for a folder or package that has no other
authority, when it was first seen. Size and time of change are compared before each start; a file whose time differs is
read again, all of them when a model is verified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.files.replacement import replace_file

CHUNK = 4 * 1024 * 1024
Progress = Callable[[int], None]  # bytes read since the last call


@dataclass(frozen=True)
class Entry:
    name: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """commit: of the hub, or empty for a folder or package."""

    model_id: str
    revision: str
    commit: str
    files: tuple[Entry, ...]

    @property
    def fingerprint(self) -> str:
        """One digest of all files."""
        lines = "".join(f"{entry.sha256} {entry.size} {entry.name}\n" for entry in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True)
class Change:
    """A file that is not what it was. ``certain``: its content differs; else only its time of change does."""

    name: str
    why: str
    certain: bool


def write(path: Path, manifest: Manifest) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(asdict(manifest), indent=1), durable=False)


def read(path: Path) -> Manifest | None:
    """None where there is none, or none that can be read: then it is made anew."""
    try:
        told = json.loads(path.read_text())
        return Manifest(**{**told, "files": tuple(Entry(**entry) for entry in told["files"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def entry(folder: Path, name: str, progress: Progress = lambda _: None) -> Entry:
    """A file as it is now, read as a whole. Raises: OSError."""
    path = folder / name
    seen = path.stat()
    return Entry(name, seen.st_size, seen.st_mtime_ns, digest(path, progress))


def digest(path: Path, progress: Progress = lambda _: None) -> str:
    """SHA-256, in hex."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            progress(len(chunk))
    return found.hexdigest()


def expected(path: Path, size: int) -> tuple[str, Callable[[], str]] | None:
    """(digest, how to compute it) that the hub's cache gives a file: its blob is named by it. None elsewhere."""
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return None
    if len(blob.name) == 64:
        return blob.name, lambda: digest(blob)
    return (blob.name, lambda: git_digest(blob, size)) if len(blob.name) == 40 else None


def git_digest(path: Path, size: int) -> str:
    """As git names a blob: SHA-1 over its kind, size and content."""
    found = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    found.update(path.read_bytes())
    return found.hexdigest()


def changes(manifest: Manifest, folder: Path) -> list[Change]:
    """What differs by size or time, without reading the files."""
    found = []
    for known in manifest.files:
        try:
            seen = (folder / known.name).stat()
        except OSError:
            found.append(Change(known.name, "is missing", certain=True))
            continue
        if seen.st_size != known.size:
            found.append(Change(known.name, f"has {seen.st_size} bytes instead of {known.size}", certain=True))
        elif seen.st_mtime_ns != known.mtime_ns:
            found.append(Change(known.name, "was changed since it was verified", certain=False))
    return found


def differing(manifest: Manifest, folder: Path, suspects: Iterable[Change]) -> Change | None:
    """The first of the suspects whose content really is another. Reads those of which only the time is known."""
    sums = {known.name: known.sha256 for known in manifest.files}
    for suspect in suspects:
        if suspect.certain:
            return suspect
        if digest(folder / suspect.name) != sums[suspect.name]:
            return Change(suspect.name, "has another content than when it was verified", certain=True)
    return None
