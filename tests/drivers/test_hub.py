"""The cache of the hub: a reference is a name in its folder and a commit, whatever somebody has put there."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.core.problems import Problem
from appliance.drivers import hub
from testing.durability import Synced, names_of

COMMIT = "a" * 40


@pytest.fixture
def refs(tmp_path: Path) -> Path:
    """Of `org/model`, whose only snapshot is COMMIT."""
    repository = hub.repository_folder("org/model", str(tmp_path))
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "refs").mkdir()
    return repository / "refs"


def test_a_reference_names_a_snapshot(refs: Path, tmp_path: Path) -> None:
    (refs / "main").write_text(f"{COMMIT}\n")
    (refs / "pr").mkdir()
    (refs / "pr" / "1").write_text(COMMIT)
    for revision in ("main", "pr/1", COMMIT):
        place = hub.cached("org/model", revision, str(tmp_path))
        assert place is not None
        assert place.folder.name == COMMIT


@pytest.mark.parametrize("revision", ["/dev/zero", "../snapshots", "pr/../../x", "..", "none", "", "x\0y"])
def test_what_leads_elsewhere_names_nothing(refs: Path, tmp_path: Path, revision: str) -> None:
    (refs.parent / "x").write_text(COMMIT)
    assert hub.cached("org/model", revision, str(tmp_path)) is None


ODD: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "not text": lambda path: path.write_bytes(b"\xff" * 40),
    "long": lambda path: path.write_text(COMMIT * 10**6),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_what_is_no_reference_names_nothing(refs: Path, tmp_path: Path, odd: Callable[[Path], object]) -> None:
    odd(refs / "main")
    assert hub.cached("org/model", "main", str(tmp_path)) is None


def test_a_folder_that_happens_to_be_here_is_not_the_model(
    refs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started the appliance beside a folder `org/model` had that one served."""
    (here := tmp_path / "here/org/model").mkdir(parents=True)
    (here / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    assert not hub.is_folder("org/model")
    assert hub.locate("org/model", None, str(tmp_path / "none")) is None
    (refs / "main").write_text(COMMIT)
    place = hub.locate("org/model", None, str(tmp_path))
    assert place == hub.ModelLocation(refs.parent / "snapshots" / COMMIT, "hub", COMMIT)
    assert hub.locate(str(here)) == hub.ModelLocation(here, "folder")


def test_files_that_cannot_be_deleted_are_told(refs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be read-only."""
    monkeypatch.setattr(hub, "cache_folder", lambda cache=None: refs.parents[1])
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Problem, match='Not all files of "org/model" can be deleted'):
            hub.forget("org/model")
    hub.forget("org/model")
    assert not refs.parent.exists()
    hub.forget("org/model")


def imported(cache: Path, content: bytes) -> hub.ModelLocation:
    source = cache / "unpacked"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_bytes(content)
    return hub.install("org/n", "main", COMMIT, source, {"config.json": hashlib.sha256(content).hexdigest()})


def test_files_that_are_imported_again_never_leave_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of the same archive that was killed half-way had taken the model away."""
    monkeypatch.setattr(hub, "cache_folder", lambda cache=None: tmp_path)
    place = imported(tmp_path, b"{}")
    present = os.stat(place.folder).st_ino
    assert imported(tmp_path, b"{}") == place
    assert os.stat(place.folder).st_ino == present
    assert imported(tmp_path, b"[]") == place
    assert (place.folder / "config.json").read_bytes() == b"[]"
    assert os.listdir(place.folder.parent) == [COMMIT]


def test_a_power_cut_takes_nothing_of_an_import_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cache_folder", lambda cache=None: tmp_path)
    synced = Synced(monkeypatch)
    snapshot = imported(tmp_path, b"{}").folder
    assert (snapshot / "config.json").resolve() in synced
    folders = names_of(snapshot, tmp_path)
    assert {tmp_path, snapshot, snapshot.parent, snapshot.parents[1] / "blobs"} < folders
    assert not [folder for folder in folders if folder not in synced]
