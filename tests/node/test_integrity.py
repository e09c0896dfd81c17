"""Which files are not as they were proved, and what is said of their model."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.core import models
from appliance.core.problems import Problem
from appliance.drivers import manifests, modelfiles
from appliance.drivers.manifests import Manifest
from appliance.node import integrity, model_overview
from appliance.node.context import Node
from testing.engines import FAMILIES
from testing.specs import configured

WEIGHTS = "model.safetensors"
ADDED = "sentence_bert_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FAMILIES / "bert-cls", tmp_path / "model"))


@pytest.fixture
def node(tmp_path: Path, folder: Path) -> Node:
    """The folder is a model that was verified."""
    node, model_id = Node.at(configured(data_dir=str(tmp_path / "data"))), str(folder)
    entries = tuple(manifests.entry(folder, file.name) for file in modelfiles.serving_files(folder))
    manifest = Manifest(model_id, "", "", entries, ("README.md",))
    node.folder.mkdir()
    manifests.keep(node.layout, manifest)
    verified = models.Model(model_id, verification=models.Verification("now", manifest.fingerprint))
    node.models.update(lambda before: models.with_model(before, verified))
    return node


def touched(folder: Path) -> None:
    os.utime(folder / WEIGHTS, ns=(1, 1))


def flipped(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-7] ^= 1
    (folder / WEIGHTS).write_bytes(raw)


def longer(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"x")


def gone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def with_limit(folder: Path) -> None:
    (folder / ADDED).write_text('{"max_seq_length": 4}')


def with_limit_of_the_hub(folder: Path) -> None:
    """As TEI fetches it when it lacks it."""
    blob = folder.parent / "blobs" / ("d" * 40)
    blob.parent.mkdir()
    blob.write_text('{"max_seq_length": 4}')
    (folder / ADDED).symlink_to(blob)


def moved_in(folder: Path) -> None:
    """Older than all else: times tell nothing."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    os.utime(elsewhere / "config.json", ns=(1, 1))
    elsewhere.rename(folder / "2_Dense")


def with_words(folder: Path) -> None:
    (folder / "README.md").write_text("a model")


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        (lambda folder: None, "verified", None),
        (touched, "failed", None),
        (with_words, "verified", None),
        (with_limit_of_the_hub, "verified", None),
        (flipped, "failed", f"{WEIGHTS} has another content than when it was verified"),
        (longer, "failed", f"{WEIGHTS} has .* bytes instead of"),
        (with_limit, "failed", f"{ADDED} was added since it was verified"),
        (moved_in, "failed", "2_Dense/config.json was added since it was verified"),
        (gone, "available", f"{WEIGHTS} is missing"),
    ],
)
def test_a_model_is_what_its_files_are(
    node: Node, folder: Path, change: Callable[[Path], None], status: str, why: str | None
) -> None:
    change(folder)
    assert model_overview.show(node, str(folder)).status == status
    if why is None:
        integrity.refuse_changed(str(node.folder), str(folder), None)
        return
    with pytest.raises(Problem, match=why) as refused:
        integrity.refuse_changed(str(node.folder), str(folder), None)
    assert refused.value.code == "MODEL_CHANGED"


def test_a_manifest_of_an_older_release_does_not_tell_what_was_added(node: Node, folder: Path) -> None:
    with_limit(folder)
    path = Path(node.layout.manifest(str(folder), ""))
    fields = json.loads(path.read_text())
    del fields["others"]
    path.write_text(json.dumps(fields))
    integrity.refuse_changed(str(node.folder), str(folder), None)
    assert model_overview.show(node, str(folder)).status == "verified"
