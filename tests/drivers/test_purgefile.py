"""What is purged is known to all processes, until the store has done it and for an hour."""

from pathlib import Path

import pytest

from appliance.core.cachekey import Purge
from appliance.drivers.purgefile import KEPT_MS, PurgeFile

PURGE = Purge("f", 10, 20, "why")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "purges.json"


def test_nothing_is_purged_without_a_file(path: Path) -> None:
    assert PurgeFile(path).current() == ()


def test_another_process_sees_it_at_once(path: Path) -> None:
    one, other = PurgeFile(path), PurgeFile(path)
    assert other.current() == ()
    one.add(PURGE)
    assert other.current() == (PURGE,)
    assert other.undone() == [PURGE]


def test_what_is_done_is_still_listed_and_not_done_again(path: Path) -> None:
    purges = PurgeFile(path)
    purges.add(PURGE)
    purges.mark_done(PURGE)
    assert (purges.current(), purges.undone()) == ((PURGE,), [])


def test_what_was_done_long_ago_is_dropped_and_what_was_not_stays(path: Path) -> None:
    purges = PurgeFile(path)
    done, undone, later = PURGE, Purge("g", 10, 20), Purge("h", 0, 30 + KEPT_MS)
    for each in (done, undone, later):
        purges.add(each)
    purges.mark_done(done)
    assert set(purges.current()) == {undone, later}


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[["f", 1, 2]]', '[["f", "x", 2, "", true]]', "nonsense"])
def test_a_damaged_file_is_as_none(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    purges = PurgeFile(path)
    assert purges.current() == ()
    purges.add(PURGE)
    assert purges.current() == (PURGE,)


def test_a_list_that_cannot_be_read_for_a_moment_still_holds(tmp_path: Path) -> None:
    path = tmp_path / "purges.json"
    purges = PurgeFile(path)
    purges.add(PURGE)
    assert purges.current() == (PURGE,)
    path.rename(tmp_path / "aside")
    path.mkdir()  # read as a file, it is an error of the system
    assert purges.current() == (PURGE,)
    with pytest.raises(OSError, match="directory"):  # and nobody writes a list without it
        purges.add(Purge("cd", 1, 2))
    path.rmdir()
    (tmp_path / "aside").rename(path)
    assert purges.current() == (PURGE,)
