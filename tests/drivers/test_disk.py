"""A folder that takes a block takes files; for any other the reason is told."""

import os
from pathlib import Path

from appliance.drivers import disk


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    assert disk.refusal(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert isinstance(disk.refusal(tmp_path / "none"), FileNotFoundError)
    (tmp_path / "file").touch()
    assert isinstance(disk.refusal(tmp_path / "file"), NotADirectoryError)


def test_nothing_that_is_there_is_written_to(tmp_path: Path) -> None:
    """root looks at folders of others, too: a link of theirs by the name of the probe had any file emptied."""
    (others := tmp_path / "others").write_text("kept")
    (folder := tmp_path / "folder").mkdir()
    (folder / f".probe-{os.getpid()}").symlink_to(others)  # as it was named
    assert disk.refusal(folder) is None
    assert others.read_text() == "kept"
    assert [each.name for each in folder.iterdir()] == [f".probe-{os.getpid()}"]


def test_a_probe_by_a_name_that_is_taken_is_another_one(tmp_path: Path) -> None:
    (tmp_path / f".probe-{os.getpid()}").write_text("kept")
    assert disk.refusal(tmp_path) is None
    assert (tmp_path / f".probe-{os.getpid()}").read_text() == "kept"
