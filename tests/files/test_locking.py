"""A lock that processes share: its folder is made, and whoever does not get it is told why."""

import stat
from pathlib import Path

import pytest

from appliance.core.problems import Kind, Problem
from appliance.files.locking import locked

TAKEN = Problem(Kind.UNAVAILABLE, "TAKEN", "another has it")


def refused(error: OSError) -> Problem:
    return Problem(Kind.EXHAUSTED, "REFUSED", str(error))


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "lock"
    with locked(path, 0, TAKEN, refused, mode=0o700):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with pytest.raises(Problem) as caught, locked(path, 0, TAKEN, refused):
            raise AssertionError("two have it")
        assert caught.value is TAKEN
    with locked(str(path), 0, TAKEN, refused):
        pass


def test_it_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the block"), locked(tmp_path / "lock", 0, TAKEN, refused):
        raise ValueError("of the block")
    with locked(tmp_path / "lock", 0, TAKEN, refused):
        pass


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Problem) as caught, locked(tmp_path / "file" / "lock", 0, TAKEN, refused):
        pass
    assert caught.value.code == "REFUSED"
