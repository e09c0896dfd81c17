"""A pipe without a writer does not block the program that opens it; what is no regular file is refused."""

import os
from pathlib import Path

import pytest

from appliance.files.opening import open_regular


@pytest.mark.timeout(10)
@pytest.mark.parametrize("has_writer", [False, True])
def test_a_pipe_is_refused_at_once(tmp_path: Path, has_writer: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK) if has_writer else None
    with pytest.raises(OSError, match="no regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError):
        open_regular(tmp_path)
    if writer:
        os.close(writer)


def test_a_file_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"x" * 100_000
