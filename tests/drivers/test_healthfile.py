"""What the monitor writes is what the other programs read, and a file that cannot be read says nothing."""

from pathlib import Path

import pytest

from appliance.drivers.healthfile import HealthFile, ProbedProcess

NOW = "2026-01-01T00:00:00Z"
PROBE = {"failures": 2, "checked_at": NOW, "pid": 7, "ready": True}


@pytest.fixture
def file(tmp_path: Path) -> HealthFile:
    return HealthFile(tmp_path / "health.json")


def test_probes_are_those_of_the_launch_that_is_asked_for(file: HealthFile) -> None:
    file.write({"a": {"launch": 3, "replicas": {"0": PROBE}}})
    probes = file.read()
    assert probes.since(3, "a") == [PROBE]
    assert probes.since(4, "a") == probes.since(3, "b") == []


def test_processes_are_those_of_replicas_that_have_one(file: HealthFile) -> None:
    file.write({"a": {"launch": 3, "replicas": {"0": PROBE, "1": {**PROBE, "pid": None}}}})
    assert file.processes() == [ProbedProcess("a", 0, 3, 7, True, NOW)]


def test_a_file_that_is_missing_says_nothing(file: HealthFile) -> None:
    assert (file.written_at(), file.processes(), file.read().since(1, "a")) == (None, [], [])
    file.write({})
    assert file.written_at()


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"replicas": {"0": {"pid": 1}}}}'])
def test_a_file_of_another_shape_has_no_processes(file: HealthFile, text: str) -> None:
    file.path.write_text(text)
    assert file.processes() == []
