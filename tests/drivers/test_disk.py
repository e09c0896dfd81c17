"""A folder that takes a block takes files; for any other the reason is told."""

from pathlib import Path

from appliance.drivers import disk


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    assert disk.refusal(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert isinstance(disk.refusal(tmp_path / "none"), FileNotFoundError)
    (tmp_path / "file").touch()
    assert isinstance(disk.refusal(tmp_path / "file"), NotADirectoryError)
