"""A file that is replaced is heard of at once; what happens to others beside it is not."""

import select
from pathlib import Path

import pytest

from appliance.drivers.filechange import FileChange
from appliance.files.replacement import replace_file


def ready(change: FileChange, secs: float = 5.0) -> bool:
    return bool(select.select([change], [], [], secs)[0])


def test_a_replacement_is_heard_once(tmp_path: Path) -> None:
    path = tmp_path / "state.toml"
    change = FileChange(path)
    assert not ready(change, 0)
    for content in ("one", "two"):
        replace_file(path, content, durable=True)
        assert ready(change)
        assert change.heard()
        assert not change.heard()
        assert not ready(change, 0)
    change.close()


def test_other_files_of_the_folder_are_not_meant(tmp_path: Path) -> None:
    change = FileChange(tmp_path / "state.toml")
    for name in ("health.json", "state.toml.good", "state", "é" * 60):
        replace_file(tmp_path / name, "x", durable=False)
    assert ready(change)
    assert not change.heard()
    for number in range(3000):  # more than one reading has
        replace_file(tmp_path / f"other-{number}", "x", durable=False)
    replace_file(tmp_path / "state.toml", "x", durable=False)
    assert change.heard()
    change.close()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"state\.toml"):
        FileChange(tmp_path / "nowhere" / "state.toml")
