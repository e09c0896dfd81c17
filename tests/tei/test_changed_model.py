"""A replica that reads another cache of the hub than ours starts on no changed file either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.core import state
from appliance.core.layout import Layout
from appliance.core.problems import Problem
from appliance.core.settings import parse
from appliance.drivers import hub, manifests
from appliance.drivers.manifests import Manifest
from appliance.node.context import Node, now
from appliance.node.integrity import refuse_changed
from appliance.operations import instances
from testing.specs import spec

COMMIT = "c" * 40
CONTENT = {"config.json": b"{}", "model.safetensors": b"weights"}


def cache(folder: Path, **changed: bytes) -> Path:
    """One that holds `org/model`; files named by their stems may have another content."""
    repository = hub.repository_folder("org/model", str(folder))
    snapshot = repository / "snapshots" / COMMIT
    for path in (snapshot, repository / "refs"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name, content in CONTENT.items():
        (snapshot / name).write_bytes(changed.get(Path(name).stem, content))
    return snapshot


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder in which `org/model` was verified."""
    snapshot = cache(tmp_path / "verified")
    folder = tmp_path / "data"
    folder.mkdir()
    entries = tuple(manifests.entry(snapshot, name) for name in CONTENT)
    path = Path(Layout(str(folder)).manifest("org/model", ""))
    manifests.write(path, Manifest("org/model", "", COMMIT, entries))
    return folder


def test_what_the_flag_names_is_what_is_compared(data: Path, tmp_path: Path) -> None:
    cache(tmp_path / "same")
    cache(tmp_path / "other", model=b"weightz")
    refuse_changed(str(data), "org/model", None, str(tmp_path / "same"))
    with pytest.raises(Problem, match=r"model\.safetensors"):
        refuse_changed(str(data), "org/model", None, str(tmp_path / "other"))


@pytest.mark.parametrize("joined", [True, False])
def test_create_and_start_look_there(data: Path, tmp_path: Path, joined: bool) -> None:
    cache(tmp_path / "other", model=b"weightz")
    flag = "--huggingface-hub-cache"
    arguments = [f"{flag}={tmp_path}/other"] if joined else [flag, f"{tmp_path}/other"]
    wanted = spec("a", extra_args=arguments)
    settings = parse({}, {}, {}, str(data))
    node = Node.at(settings)
    node.state.update(lambda before: state.stop(state.add(before, wanted, settings, (), now()), "a"))
    for use in (lambda: instances.validated(node, wanted.mapping()), lambda: instances.start(node, "a")):
        with pytest.raises(Problem, match=r"model\.safetensors") as caught:
            use()
        assert caught.value.code == "MODEL_CHANGED"


@pytest.mark.processes
def test_tei_is_not_run_on_it_and_reads_our_cache_where_it_is_told_no_other(data: Path, tmp_path: Path) -> None:
    cache(tmp_path / "other", model=b"weightz")
    cache(tmp_path / "ours")
    binary = tmp_path / "router"
    binary.write_text('#!/bin/sh\necho "$HUGGINGFACE_HUB_CACHE"\n')
    binary.chmod(0o755)
    environ = {**os.environ, "TEI_MANAGER_DATA_DIR": str(data), "HF_HUB_CACHE": str(tmp_path / "ours")}
    command = [sys.executable, "-m", "appliance.tei", str(binary), "--model-id", "org/model"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, f"{tmp_path}/ours\n")
    command += ["--huggingface-hub-cache", str(tmp_path / "other")]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert "model.safetensors" in run.stderr
