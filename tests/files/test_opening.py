"""A pipe without a writer does not block the program that opens it."""

import os
from pathlib import Path

import pytest

from appliance.files.opening import without_waiting


@pytest.mark.timeout(10)
def test_a_pipe_is_opened_at_once_and_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "pipe", "rb", opener=without_waiting) as file:
        assert file.read() == b""


def test_a_file_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    with open(tmp_path / "file", "rb", opener=without_waiting) as file:
        assert file.read() == b"x" * 100_000
