"""What a reconcile would change is found out without changing anything; what it changes is asked for once."""

import os
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.core import state
from appliance.core.problems import Problem
from appliance.core.program import MARKER
from appliance.drivers.listeners import marker_of
from appliance.drivers.supervisord import MemberDifference, Supervisor, stuck
from appliance.node.context import Node, now
from appliance.operations import supervision
from testing.running import eventually
from testing.specs import configured, spec


class Differences:
    """A supervisor that says what differs for it."""

    def __init__(self) -> None:
        self.stuck: set[str] = set()  # whose processes do not end
        self.changed: list[str] = []
        self.questions = 0
        self.done: list[str] = []

    def difference(self) -> tuple[list[str], list[str], list[str]]:
        self.questions += 1
        return [], list(self.changed), []

    def answers(self) -> bool:
        self.questions += 1
        return False

    def member_difference(self, group: str) -> MemberDifference:
        return MemberDifference([f"{group}-2"], [f"{group}-0"], [f"{group}-1"])

    def remove_members(self, group: str, names: Collection[str], timeout: float) -> None:
        if group in self.stuck:
            raise stuck(group, timeout)
        self.done.append(f"remove {' '.join(names)}")

    def add_member(self, group: str, name: str) -> None:
        self.done.append(f"add {name}")
        if group in self.changed:
            self.changed.remove(group)


@pytest.fixture
def supervisor() -> Differences:
    return Differences()


@pytest.fixture
def node(tmp_path: Path, supervisor: Differences) -> Node:
    settings = replace(
        configured(), data_dir=str(tmp_path), state_file=str(tmp_path / "state.toml"), log_dir=str(tmp_path / "logs")
    )
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


def test_a_change_of_one_instance_asks_supervisor_once(node: Node, supervisor: Differences) -> None:
    supervisor.changed = ["a"]
    assert supervision.reconcile(node, {"a"}) == ["a"]
    assert (supervisor.questions, supervisor.done) == (1, ["remove a-0 a-1", "add a-0", "add a-2"])


def test_whose_group_is_worked_on_waits_and_repeats_nothing(node: Node, supervisor: Differences) -> None:
    supervisor.changed = ["a"]
    with ThreadPoolExecutor(1) as pool:
        with supervision.group_lock(node, "a", wait=True):
            waiting = pool.submit(supervision.reconcile, node, {"a"})
            assert not wait([waiting], timeout=0.3).done
            supervisor.changed.clear()  # the holder of the lock has done it
        assert waiting.result(timeout=20) == []
    assert supervisor.done == []


def test_groups_of_others_are_replaced_too_unless_they_are_worked_on(node: Node, supervisor: Differences) -> None:
    supervisor.changed = ["a", "b"]
    with ThreadPoolExecutor(1) as pool, supervision.group_lock(node, "b", wait=True):
        assert pool.submit(supervision.reconcile, node, {"a"}).result(timeout=20) == ["a"]
        assert pool.submit(supervision.reconcile, node, ()).result(timeout=20) == []
    assert supervision.reconcile(node, {"a"}) == ["b"]


def test_one_that_cannot_end_fails_no_work_on_another(
    node: Node, supervisor: Differences, caplog: pytest.LogCaptureFixture
) -> None:
    """A process in the midst of a driver's call: every verb on any other instance was answered with its error."""
    supervisor.changed, supervisor.stuck = ["a", "b"], {"a"}
    assert supervision.reconcile(node, {"b"}) == ["b"]
    assert supervisor.done == ["remove b-0 b-1", "add b-0", "add b-2"]
    (line,) = caplog.messages
    assert line.startswith('The processes of "a" are not as they should be: ')
    supervisor.stuck = set()
    assert supervision.reconcile(node, {"b"}) == ["a"], "it is tried again"


def test_one_that_cannot_end_fails_the_work_on_itself(node: Node, supervisor: Differences) -> None:
    supervisor.changed, supervisor.stuck = ["a", "b"], {"a"}
    with pytest.raises(Problem) as own:
        supervision.reconcile(node, {"a"})
    assert supervisor.done == []
    assert own.value.code == "BACKEND_UNAVAILABLE"


def test_left_over_processes_are_ended_and_without_any_supervisor_is_not_asked(
    node: Node, supervisor: Differences
) -> None:
    assert supervision.end_leftovers(node, "a") == []
    assert supervisor.questions == 0
    mark = f"{node.id}:a:0:1"
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: mark}) as left:
        eventually(lambda: marker_of(left.pid, MARKER) == mark)  # right behind its exec it has no environment yet
        assert supervision.end_leftovers(node, "b") == []
        assert left.poll() is None
        assert supervision.end_leftovers(node, "a") == [mark]
        assert left.wait(timeout=20) is not None


def test_logs_of_replicas_that_an_instance_had_before_go_with_it(node: Node) -> None:
    """Of an instance that was given fewer and then deleted they stayed for ever."""
    folder = Path(node.layout.log("x")).parent
    folder.mkdir(exist_ok=True)
    gone, stay = {"a-0.log", "a-1.log", "a-12.log"}, {"a-b-0.log", "a@2-0.log", "b-0.log"}
    for name in stay | gone:
        (folder / name).write_text("a line")
    node.set_logs_aside(node.state.read().get("a"))
    assert {path.name for path in folder.iterdir() if path.is_file()} == stay
    assert {path.name for path in Path(node.layout.deleted_logs).iterdir()} == gone


def test_logs_of_who_is_gone_are_set_aside_and_others_stay(node: Node) -> None:
    folder = Path(node.layout.log("x")).parent
    folder.mkdir(exist_ok=True)
    stay = {"a-0.log", "b-3.log", "multiplexer-0.log", "control.log", "job.7.log", "a-0.log.1", "app-20260101.log"}
    gone = {"a@2-0.log", "b@7-1.log"}
    for name in stay | gone:
        (folder / name).write_text("a line")
    supervision.set_stale_logs_aside(node)
    assert {path.name for path in folder.iterdir() if path.is_file()} == stay
    assert {path.name for path in Path(node.layout.deleted_logs).iterdir()} == gone
    (folder / "appendix-0.log").write_text("a line")
    supervision.set_stale_logs_aside(node, "app")  # of which there was one
    assert {path.name for path in folder.iterdir() if path.is_file()} == stay - {"app-20260101.log"} | {
        "appendix-0.log"
    }
