"""Digests are those of the tools that everybody has."""

import subprocess
from pathlib import Path

import pytest

from appliance.files import checksum
from appliance.files.checksum import git_blob_of, sha256_of


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_digests_are_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checksum, "CHUNK", 300)
    file, read = tmp_path / "a", list[int]()
    file.write_bytes(bytes(size))
    assert sha256_of(file, read.append) == subprocess.check_output(["sha256sum", str(file)]).split()[0].decode()
    assert sum(read) == size
    assert git_blob_of(file) == subprocess.check_output(["git", "hash-object", str(file)]).decode().strip()
