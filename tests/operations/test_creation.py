"""An instance that could not be started is taken back, or the caller is told that it is there."""

from pathlib import Path
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.core.state import with_instance
from appliance.node.context import Node
from appliance.operations.creation import taken_back
from testing.specs import instance, spec

FULL = Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", "Cannot write: no space")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))
    made.state.update(lambda before: with_instance(before, instance(spec("a"))))
    return made


@pytest.mark.parametrize("error", [FULL, OSError("no file descriptor")])
def test_whoever_is_refused_finds_nothing_afterwards(node: Node, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, taken_back(node, node.state.read().get("a")):
        raise error
    assert caught.value is error
    assert not node.state.read().instances


def test_one_that_cannot_be_taken_back_is_told_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer said that nothing was changed, and the instance started later by itself."""

    def update(_: Any) -> None:
        raise FULL

    created = node.state.read().get("a")
    monkeypatch.setattr(node.state, "update", update)
    with pytest.raises(Problem, match="could not be started: no file descriptor") as caught, taken_back(node, created):
        raise OSError("no file descriptor")
    assert (caught.value.kind, caught.value.code) == (Kind.EXHAUSTED, "NOT_TAKEN_BACK")
    assert '"a" is created' in caught.value.message
    assert "/instances/a/start" in caught.value.message
