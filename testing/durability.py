"""What has been synced to the disk, for tests of what a power cut leaves."""

import os
from pathlib import Path

import pytest


class Synced:
    """Every file and folder that is synced from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inodes: set[int] = set()
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.sync)

    def sync(self, handle: int) -> None:
        self.fsync(handle)
        self.inodes.add(os.fstat(handle).st_ino)

    def __contains__(self, path: Path) -> bool:
        return path.stat().st_ino in self.inodes


def names_of(snapshot: Path, root: Path) -> set[Path]:
    """The folders in which a snapshot and its blobs have their names, up to ``root``."""
    found = [snapshot, *snapshot.rglob("*")]
    paths = {path.parent for path in found} | {path.resolve().parent for path in found if path.is_symlink()}
    return {folder for path in paths for folder in (path, *path.parents) if folder.is_relative_to(root)}
