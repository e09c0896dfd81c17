"""Every replacement and every write gives a file another signature; reading it does not."""

import os
from pathlib import Path

import pytest

from appliance.files.replacement import replace_file
from appliance.files.signature import signature


def test_it_stays_while_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    before = signature(path)
    path.read_text()
    assert before is not None
    assert signature(str(path)) == before


def test_a_replacement_of_equal_content_and_time_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    before, status = signature(path), path.stat()
    replace_file(path, "content", durable=False)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert signature(path) != before


def test_a_write_in_place_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    before = signature(path)
    with path.open("a") as file:
        file.write("!")
    assert signature(path) != before


def test_there_is_none_without_a_file(tmp_path: Path) -> None:
    assert signature(tmp_path / "none") is None


def test_what_cannot_be_known_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        signature(tmp_path / "file" / "below")
