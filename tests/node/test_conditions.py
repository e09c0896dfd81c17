"""What is wrong with the machine under the appliance, looked for now."""

from pathlib import Path

import pytest

from appliance.core.events import Event
from appliance.core.settings import Settings
from appliance.node import conditions
from appliance.node.context import Node

DISK = {event for event in Event if event.value.startswith("disk_")}


def node_at(folder: Path) -> Node:
    return Node.at(Settings(data_dir=str(folder), state_file=f"{folder}/state.toml", log_dir=f"{folder}/logs"))


def test_before_the_first_start_no_disk_is_failing(tmp_path: Path) -> None:
    """`appliance doctor` complained of the data folder that the first start makes."""
    node = node_at(tmp_path / "none")
    assert not DISK & conditions.present(node).keys()
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_gone_is_told_by_the_programs_of_the_appliance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(conditions.NODE_VARIABLE, "b0b0b0")
    assert DISK & conditions.present(node_at(tmp_path / "none")).keys()


def test_what_is_no_folder_is_still_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert DISK & conditions.present(node_at(tmp_path / "file")).keys()
