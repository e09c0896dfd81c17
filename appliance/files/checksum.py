"""Digests of files, in hex, read in pieces. Raises: OSError."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 4 * 1024 * 1024
Progress = Callable[[int], object]  # bytes read since the last call


def sha256_of(path: Path, progress: Progress = lambda _: None) -> str:
    return read_into(hashlib.sha256(), path, progress)


def git_blob_of(path: Path) -> str:
    """By which git names a blob, and the hub a small file: SHA-1 over its kind, size and content."""
    checksum = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    return read_into(checksum, path, lambda _: None)


def read_into(checksum: Any, path: Path, progress: Progress) -> str:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum.update(chunk)
            progress(len(chunk))
    digest: str = checksum.hexdigest()
    return digest
