"""Manifests: sizes, times and digests of a model's verified files, so that a model with other files never starts.

A manifest is written when every digest was compared with the hub's; for a folder or package, which has no other
authority, when its files were read for the first time. Before each start, sizes and times of change are compared, and
a file with another time is read again. A verification reads all files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from appliance.core.layout import Layout
from appliance.files.checksum import Progress, git_blob_of, sha256_of
from appliance.files.replacement import replace_file


@dataclass(frozen=True)
class Entry:
    name: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """commit: the hub's, empty for a folder or package. others: names of files that were there besides, or that the hub
    has of the commit; None in those of older releases."""

    model_id: str
    revision: str
    commit: str
    files: tuple[Entry, ...]
    others: tuple[str, ...] | None = None

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
    """A file that differs from its entry. certain: its content differs; else perhaps only its time of change does."""

    name: str
    why: str
    certain: bool


class HubDigest(NamedTuple):
    """expected: the digest by which the hub names a file; computed(): the digest of its present content."""

    expected: str
    computed: Callable[[], str]


def keep(layout: Layout, manifest: Manifest) -> None:
    """By its revision and by its commit: the same files may be asked for by either. Raises: OSError."""
    for revision in dict.fromkeys((manifest.revision, manifest.commit or manifest.revision)):
        write(Path(layout.manifest(manifest.model_id, revision)), manifest)


def kept(layout: Layout, model_id: str, revision: str, commit: str) -> Manifest | None:
    """That of these very files: of the same commit, where they are the hub's. revision: empty for the main one."""
    for name in dict.fromkeys((revision, commit)):
        manifest = read(Path(layout.manifest(model_id, name)))
        if manifest and manifest.commit == commit:
            return manifest
    return None


def forget(layout: Layout, model_id: str, revision: str) -> None:
    """By whatever name the files were kept, also those that the model had before its revision was named. Raises:
    OSError."""
    for name in dict.fromkeys(("", revision)):
        path = Path(layout.manifest(model_id, name))
        if manifest := read(path):
            Path(layout.manifest(model_id, manifest.commit)).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def write(path: Path, manifest: Manifest) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(asdict(manifest), indent=1), durable=True)  # with none, nothing is compared


def read(path: Path) -> Manifest | None:
    """None when there is no manifest or it cannot be read: then the caller makes a new one."""
    try:
        fields = json.loads(path.read_text())
        others = fields.get("others")
        files = tuple(Entry(**entry) for entry in fields["files"])
        return Manifest(**{**fields, "files": files, "others": None if others is None else tuple(others)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def entry(folder: Path, name: str, progress: Progress = lambda _: None) -> Entry:
    """The entry of a file as it is now, read as a whole. Raises: OSError."""
    status = (folder / name).stat()
    return Entry(name, status.st_size, status.st_mtime_ns, sha256_of(folder / name, progress))


def entry_of(folder: Path, name: str, sha256: str) -> Entry:
    """The same of a file whose digest is known. Raises: OSError."""
    status = (folder / name).stat()
    return Entry(name, status.st_size, status.st_mtime_ns, sha256)


def hub_digest(path: Path) -> HubDigest | None:
    """The digest by which the hub's cache names the blob of a file; None for a file outside of the cache."""
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return None
    if len(blob.name) == 64:
        return HubDigest(blob.name, lambda: sha256_of(blob))
    return HubDigest(blob.name, lambda: git_blob_of(blob)) if len(blob.name) == 40 else None


def changes(manifest: Manifest, folder: Path) -> list[Change]:
    """The files whose size or time differs. The files are not read."""
    changed = []
    for entry in manifest.files:
        try:
            status = (folder / entry.name).stat()
        except OSError:
            changed.append(Change(entry.name, "is missing", certain=True))
            continue
        if status.st_size != entry.size:
            changed.append(Change(entry.name, f"has {status.st_size} bytes instead of {entry.size}", certain=True))
        elif status.st_mtime_ns != entry.mtime_ns:
            changed.append(Change(entry.name, "was changed since it was verified", certain=False))
    return changed


def differing(manifest: Manifest, folder: Path, suspects: Iterable[Change]) -> Change | None:
    """The first of the suspects whose content differs. Suspects that are not certain are read."""
    sums = {entry.name: entry.sha256 for entry in manifest.files}
    for suspect in suspects:
        if suspect.certain:
            return suspect
        if sha256_of(folder / suspect.name) != sums[suspect.name]:
            return Change(suspect.name, "has another content than when it was verified", certain=True)
    return None
