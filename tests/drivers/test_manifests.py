"""Manifests: what is written is read, and a file that differs is found, by its time or by its content."""

import hashlib
import os
from pathlib import Path

import pytest

from appliance.drivers import manifests
from appliance.drivers.manifests import Change, Manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_bytes(b"one")
    (folder / "b").write_bytes(b"two")
    return folder


def manifest_of(folder: Path) -> Manifest:
    return Manifest("org/m", "main", "", tuple(manifests.entry(folder, name) for name in ("a", "b")))


def test_a_manifest_is_read_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    path, manifest = tmp_path / "manifests" / "m.json", manifest_of(folder)
    assert manifests.read(path) is None
    manifests.write(path, manifest)
    assert manifests.read(path) == manifest
    assert manifest.size == 6
    path.write_text("{}")
    assert manifests.read(path) is None


def test_unchanged_files_have_no_changes(folder: Path) -> None:
    assert manifests.changes(manifest_of(folder), folder) == []


def test_a_file_with_another_size_or_no_file_has_changed_for_certain(folder: Path) -> None:
    manifest = manifest_of(folder)
    (folder / "a").write_bytes(b"longer")
    (folder / "b").unlink()
    changes = manifests.changes(manifest, folder)
    assert changes == [Change("a", "has 6 bytes instead of 3", True), Change("b", "is missing", True)]
    assert manifests.differing(manifest, folder, changes) == changes[0]


@pytest.mark.parametrize(("content", "differs"), [(b"one", False), (b"eno", True)])
def test_a_file_with_another_time_is_read(folder: Path, content: bytes, differs: bool) -> None:
    manifest = manifest_of(folder)
    (folder / "a").write_bytes(content)
    os.utime(folder / "a", ns=(1, 1))
    changes = manifests.changes(manifest, folder)
    assert [(change.name, change.certain) for change in changes] == [("a", False)]
    assert (manifests.differing(manifest, folder, changes) is not None) is differs


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_a_blob_of_the_hub_is_named_by_its_digest(tmp_path: Path, kind: str) -> None:
    content = b"weights"
    sha256 = hashlib.sha256(content).hexdigest()
    name = sha256 if kind == "sha256" else hashlib.sha1(b"blob 7\0" + content).hexdigest()
    blob, link = tmp_path / "blobs" / name, tmp_path / "model.bin"
    blob.parent.mkdir()
    blob.write_bytes(content)
    link.symlink_to(blob)
    digest = manifests.hub_digest(link)
    assert digest is not None
    assert digest.expected == digest.computed() == name
    blob.write_bytes(b"damaged")
    assert digest.computed() != name
    assert manifests.hub_digest(tmp_path / "blobs") is None
