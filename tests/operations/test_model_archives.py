"""What an import that was killed has unpacked is not left for ever."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.drivers import hub
from appliance.operations import model_archives


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def killed(cache: Path) -> Iterator[Path]:
    """What a process leaves that was killed in the midst of an import."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with model_archives.unpacking() as room:
            (room / "weights").write_bytes(bytes(1000))
            os.write(writer, str(room).encode())
            signal.pause()
    room = Path(os.read(reader, 1000).decode())
    model_archives.remove_abandoned()
    assert (room / "weights").exists(), "it is still at work"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    yield room
    os.close(reader)
    os.close(writer)


def test_nothing_is_left_of_an_import_that_ended(cache: Path) -> None:
    with model_archives.unpacking() as room:
        assert room.parent == cache
        (room / "weights").write_bytes(b"x")
    assert list(cache.iterdir()) == []


def test_what_a_killed_one_has_left_goes_and_what_another_is_at_stays(cache: Path, killed: Path) -> None:
    (cache / "models--org--m").mkdir()
    with model_archives.unpacking() as room:
        model_archives.remove_abandoned()
        assert (killed.exists(), room.exists()) == (False, True)
    assert [path.name for path in cache.iterdir()] == ["models--org--m"]


def test_where_there_is_no_cache_nothing_is_looked_for(cache: Path) -> None:
    model_archives.remove_abandoned()
    assert not cache.exists()
