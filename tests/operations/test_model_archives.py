"""An import replaces no files under an instance, and what one that was killed has unpacked is not left for ever."""

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.core import models
from appliance.core.problems import Kind, Problem
from appliance.core.state import State
from appliance.core.views import ModelView
from appliance.drivers import archive, hub
from appliance.node import integrity
from appliance.node.context import Node
from appliance.operations import model_archives
from appliance.operations import models as operations
from testing.engines import files_of
from testing.specs import configured, instance, spec

FILES = files_of("bert-cls")
COMMIT = "c" * 40
OTHERS = FILES | {"config.json": FILES["config.json"] + b"\n"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hub, "cache_folder", lambda cache=None: tmp_path / "hub")
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


@pytest.fixture
def node(tmp_path: Path, cache: Path) -> Node:
    return Node.at(configured(data_dir=str(tmp_path / "new" / "data")))


def take_in(node: Node, files: Mapping[str, bytes], revision: str = "", commit: str = "") -> ModelView:
    """An archive of org/m with these files."""
    told = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    about = {
        "format": "tei-appliance-model-1",
        "model_id": "org/m",
        "revision": revision,
        "commit": commit,
        "files": told,
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as packed:
        for name, content in {"manifest.json": json.dumps(about).encode(), **files}.items():
            info = tarfile.TarInfo(name if name == "manifest.json" else f"files/{name}")
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    raw.seek(0)
    return model_archives.take_in(node, raw, "The archive", None, lambda done, total: None)


def use(node: Node) -> None:
    """An instance of org/m."""
    one = instance(spec("one", model_id="org/m"))
    node.state.update(lambda before: State(before.generation, instances={"one": one}))


def installed() -> Mapping[str, bytes]:
    place = hub.locate("org/m", None)
    assert place
    return {name: (place.folder / name).read_bytes() for name in FILES}


def test_an_import_replaces_no_files_under_an_instance(node: Node) -> None:
    """It would go on with one model, and its next replica would serve the other."""
    take_in(node, FILES)
    use(node)
    with pytest.raises(Problem) as refused:
        take_in(node, OTHERS)
    assert (refused.value.code, "used by one" in refused.value.message) == ("MODEL_IN_USE", True)
    assert installed() == FILES
    take_in(node, FILES)  # the same ones may come again
    node.state.update(lambda before: State(before.generation, instances={}))
    take_in(node, OTHERS)
    assert installed() == OTHERS


def test_an_instance_that_waits_for_its_files_gets_them(node: Node) -> None:
    use(node)
    take_in(node, FILES)
    assert installed() == FILES


def test_files_of_no_revision_are_not_taken_in_where_one_is_registered(node: Node) -> None:
    """Nobody would find them."""
    node.models.update(lambda before: models.add(before, models.parse({"model_id": "org/m", "revision": "v1"}), "now"))
    with pytest.raises(Problem, match='registered at revision "v1"') as refused:
        take_in(node, FILES)
    assert refused.value.code == "IMPORT_FAILED"
    assert hub.locate("org/m", None) is None
    assert take_in(node, FILES, "v1").status == "downloaded"


def test_a_revision_that_is_another_commit_is_refused(node: Node) -> None:
    """The files would be installed where nobody looks for them."""
    with pytest.raises(Problem, match=f"its revision is the commit {'a' * 40}") as refused:
        take_in(node, FILES, revision="a" * 40, commit="b" * 40)
    assert refused.value.code == "IMPORT_FAILED"
    assert take_in(node, FILES, revision="a" * 40, commit="a" * 40).commit == "a" * 40


def test_what_the_commit_had_before_is_away(node: Node) -> None:
    """A module that is left makes another model of the same weights."""
    commit = "c" * 40
    take_in(node, FILES | {"special_tokens_map.json": b"{}", "2_Dense/config.json": b"{}"}, commit=commit)
    take_in(node, FILES, commit=commit)
    place = hub.locate("org/m", None)
    assert place
    left = {path.relative_to(place.folder).as_posix() for path in place.folder.rglob("*") if not path.is_dir()}
    assert left == set(FILES)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, Kind.EXHAUSTED), (errno.EIO, Kind.INVALID)])
def test_a_full_disk_is_told_as_one(node: Node, monkeypatch: pytest.MonkeyPatch, number: int, kind: Kind) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(archive, "unpack", fail)
    with pytest.raises(Problem, match=os.strerror(number)) as refused:
        take_in(node, FILES)
    assert (refused.value.kind, refused.value.code) == (kind, "IMPORT_FAILED")
    assert list(hub.cache_folder().iterdir()) == []


def test_what_stands_in_the_way_of_an_import_is_replaced_and_nothing_is_written_through_links(
    node: Node, tmp_path: Path
) -> None:
    commit, elsewhere = "d" * 40, tmp_path / "elsewhere"
    snapshot = hub.repository_folder("org/m") / "snapshots" / commit
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("theirs")
    (snapshot / "config.json").mkdir(parents=True)
    (snapshot / "1_Pooling").symlink_to(elsewhere)
    take_in(node, FILES, commit=commit)
    assert installed() == FILES
    assert (elsewhere / "config.json").read_text() == "theirs"


def test_a_model_that_is_worked_on_is_not_imported(node: Node) -> None:
    node.models.update(lambda before: models.add(before, models.parse({"model_id": "org/m"}), "now"))
    node.models.update(lambda before: models.begin(before, "org/m", "download", "now"))
    with pytest.raises(Problem) as refused:
        take_in(node, FILES)
    assert refused.value.code == "MODEL_BUSY"
    node.models.update(lambda before: models.end(before, 1, download_error="no hub"))
    assert take_in(node, FILES).download_error is None


@pytest.mark.parametrize("named", ["main", COMMIT])
def test_the_files_are_known_by_whatever_name_of_their_commit(node: Node, named: str) -> None:
    """Pinned to the commit that it had, a model with a changed byte started."""
    take_in(node, FILES, commit=COMMIT)
    data_dir = str(node.folder)
    integrity.refuse_changed(data_dir, "org/m", named)
    place = hub.locate("org/m", None)
    assert place is not None
    weights = place.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(Problem, match=r"model\.safetensors"):
        integrity.refuse_changed(data_dir, "org/m", named)
    node.models.update(lambda before: models.with_model(before, replace(before.get("org/m"), revision=COMMIT)))
    operations.remove(node, "org/m", keep_files=True)
    integrity.refuse_changed(data_dir, "org/m", named)  # on purpose
    integrity.refuse_changed(data_dir, "org/m", None)


def test_a_download_that_began_while_a_delete_waited_keeps_its_files(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete was refused, and had deleted them."""
    take_in(node, FILES)
    held = operations.files_held

    @contextmanager
    def held_later(node: Node) -> Iterator[None]:
        monkeypatch.setattr(operations, "files_held", held)
        operations.enlist(node, node.models.read().models["org/m"], "download")
        with held(node):
            yield

    monkeypatch.setattr(operations, "files_held", held_later)
    with pytest.raises(Problem) as refused:
        operations.remove(node, "org/m", keep_files=False)
    assert refused.value.code == "MODEL_BUSY"
    assert hub.locate("org/m", None) is not None


def test_a_model_whose_files_cannot_be_deleted_stays_registered(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is deleted the next time."""
    take_in(node, FILES)
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Problem) as refused:
            operations.remove(node, "org/m", keep_files=False)
    assert (refused.value.kind, refused.value.code) == (Kind.EXHAUSTED, "DELETE_FAILED")
    assert "org/m" in node.models.read().models
    operations.remove(node, "org/m", keep_files=False)
    assert "org/m" not in node.models.read().models
    assert hub.locate("org/m", None) is None


def test_a_model_whose_files_are_deleted_and_which_stays_registered_is_told_of(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer said that nothing was changed."""

    def update(_: object) -> None:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", "Cannot write. Nothing was changed")

    node.models.update(lambda before: models.add(before, models.parse({"model_id": "org/m"}), "now"))
    with monkeypatch.context() as full:
        full.setattr(node.models, "update", update)
        with pytest.raises(Problem, match='files of "org/m" are deleted, and it is registered still') as refused:
            operations.remove(node, "org/m", keep_files=False)
    assert (refused.value.kind, refused.value.code) == (Kind.EXHAUSTED, "STATE_WRITE_FAILED")
    operations.remove(node, "org/m", keep_files=False)
