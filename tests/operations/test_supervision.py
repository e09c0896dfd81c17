"""What a reconcile would change is found out without changing anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.core import state
from appliance.drivers.supervisord import Supervisor
from appliance.node.context import Node, now
from appliance.operations import supervision
from testing.specs import configured, spec


class Differences:
    """A supervisor that says what differs for it."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def difference(self) -> tuple[list[str], list[str], list[str]]:
        return [], self.changed, []


@pytest.fixture
def supervisor() -> Differences:
    return Differences()


@pytest.fixture
def node(tmp_path: Path, supervisor: Differences) -> Node:
    settings = replace(configured(), data_dir=str(tmp_path), state_file=str(tmp_path / "state.toml"))
    node = replace(Node.at(settings), supervisor=cast(Supervisor, supervisor))
    for name in ("a", "b"):
        node.state.update(lambda before, name=name: state.add(before, spec(name), settings, (), now()))
    supervision.write_sections(node)
    return node


def picture(node: Node) -> dict[str, Any]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in node.folder.glob("*.*") if path.is_file()
    }


def test_a_group_differs_while_the_state_or_supervisor_has_another(node: Node, supervisor: Differences) -> None:
    assert not supervision.differs(node, "a")
    node.state.update(lambda before: state.restart(before, "a"))
    before = picture(node)
    assert supervision.differs(node, "a")
    assert not supervision.differs(node, "b")
    assert picture(node) == before
    supervision.write_sections(node)
    assert not supervision.differs(node, "a")
    supervisor.changed = ["a"]
    assert supervision.differs(node, "a")
    assert not supervision.differs(node, "b")


def test_the_group_of_a_deleted_instance_differs_until_it_is_gone(node: Node) -> None:
    node.state.update(lambda before: state.remove(before, "a"))
    assert supervision.differs(node, "a")
    supervision.write_sections(node)
    assert not supervision.differs(node, "a")
    assert not supervision.differs(node, "never-there")


def test_an_unreadable_state_is_not_repaired_by_a_look(node: Node) -> None:
    node.state.path.write_text("{")
    assert not supervision.differs(node, "a")
    assert node.state.path.read_text() == "{"
    supervision.write_sections(node)
    assert list(node.state.read().instances) == ["a", "b"]
    assert node.state.path.read_text() != "{"
