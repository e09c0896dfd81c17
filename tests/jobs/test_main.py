"""How a job ends: with a result in the registry, whatever went wrong."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from appliance.core.models import Model
from appliance.core.problems import Kind, Problem
from appliance.drivers import configfile
from appliance.drivers.statefile import ModelsFile
from appliance.jobs import __main__ as jobs
from appliance.node.context import Node, now
from appliance.operations.models import begun


def full(*arguments: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """With job 1, to load a model, that finds the disk full."""
    monkeypatch.setenv("TEI_MANAGER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["jobs", "1"])
    monkeypatch.setattr(jobs, "load", full)
    monkeypatch.setattr(jobs, "PAUSE_SECS", 0.0)
    node = Node.at(configfile.load(os.environ))
    node.models.update(partial(begun, model=Model("org/a"), kind="load", now=now(), fields="{}"))
    return node


def verdict(node: Node) -> str:
    model = node.models.read().models["org/a"]
    assert model.job is None
    assert model.verification is not None
    return model.verification.error


def test_what_the_system_refuses_is_a_result(node: Node) -> None:
    """supervisord started such a job again at once, without end."""
    assert jobs.main() == 0
    assert verdict(node) == "The load of org/a failed: [Errno 28] No space left on device"


def test_a_result_that_cannot_be_written_is_written_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Callable[[], None]] = [
        full,
        partial(refuse, Problem(Kind.INTERNAL, "STATE_WRITE_FAILED", "Cannot write")),
    ]
    update = ModelsFile.update

    def refusing(self: ModelsFile, change: Any) -> Any:
        if refusals:
            refusals.pop()()
        return update(self, change)

    monkeypatch.setattr(ModelsFile, "update", refusing)
    assert jobs.main() == 0
    assert not refusals
    assert "No space left" in verdict(node)


def test_a_download_with_a_token_that_no_header_can_carry_has_a_result(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job died of it, and supervisord started it again at once, without end."""
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("sys.argv", ["jobs", "2"])
    node.models.update(partial(begun, model=Model("org/b"), kind="download", now=now(), fields=""))
    assert jobs.main() == 0
    model = node.models.read().models["org/b"]
    assert model.job is None
    assert "Look at HF_ENDPOINT and HF_TOKEN" in model.download_error
    assert [each["event"] for each in node.journal.since(0)] == ["model_failed"]


def refuse(problem: Problem) -> None:
    raise problem
