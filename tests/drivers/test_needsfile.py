"""Measured peaks only rise, and the oldest measurements go first."""

from pathlib import Path

import pytest

from appliance.drivers.needsfile import MOST_ENTRIES, NeedsFile


@pytest.fixture
def file(tmp_path: Path) -> NeedsFile:
    return NeedsFile(tmp_path / "gpu_needs.json")


def test_the_higher_peak_stays(file: NeedsFile) -> None:
    assert file.read() == {}
    file.raise_to({"a": 10, "b": 5})
    file.raise_to({"a": 9, "b": 6})
    assert file.read() == {"a": 10, "b": 6}


def test_a_peak_that_is_not_higher_writes_nothing(file: NeedsFile) -> None:
    file.raise_to({"a": 10})
    before = file.path.stat().st_ino
    file.raise_to({"a": 10})
    assert file.path.stat().st_ino == before


def test_a_damaged_file_is_measured_again(file: NeedsFile) -> None:
    file.path.write_text("{")
    assert file.read() == {}
    file.raise_to({"a": 1})
    assert file.read() == {"a": 1}


def test_the_oldest_measurement_goes_first(file: NeedsFile) -> None:
    file.raise_to({str(number): 1 for number in range(MOST_ENTRIES)})
    file.raise_to({"0": 2, "new": 1})  # a new measurement of the oldest makes it the newest but one
    peaks = file.read()
    assert len(peaks) == MOST_ENTRIES
    assert "1" not in peaks
    assert list(peaks)[-2:] == ["0", "new"]
