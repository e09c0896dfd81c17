"""The directory: routes outlive a state file that cannot be read, and one that never could be is not an empty one."""

import threading
from pathlib import Path

import pytest

from appliance.core import state
from appliance.core.problems import Problem
from appliance.core.routing import Route, Table, Target
from appliance.core.settings import QueueSettings
from appliance.core.state import State
from appliance.drivers.metrics import Meters
from appliance.drivers.statefile import StateFile
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.selection import InstanceSelector
from appliance.multiplexer.node_link import NodeLink
from appliance.multiplexer.remote_replicas import RemoteReplicas
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.node.context import now
from appliance.node.directory import Content, Directory, StateSource
from testing.specs import configured, spec


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / "state.toml", now, lambda message: None)


def spoil(file: StateFile) -> None:
    for path in (file.path, file.good):
        path.write_text("generation = 1\ncount = 1\n")


def test_before_the_first_change_there_is_nothing_and_nothing_wrong(file: StateFile) -> None:
    directory = Directory(StateSource(file, "embedded"))
    directory.refresh()
    directory.require()
    assert not directory.state.instances


def test_what_was_read_stays_when_the_file_cannot_be_read_any_more(file: StateFile) -> None:
    file.update(lambda before: state.add(before, spec("a"), configured(), (), now()))
    directory = Directory(StateSource(file, "embedded"))
    directory.refresh()
    before, table = directory.state, directory.table
    spoil(file)
    directory.refresh()
    directory.require()
    assert (directory.state, directory.table) == (before, table)
    assert list(directory.state.instances) == ["a"]


def test_a_process_that_starts_meanwhile_says_so_and_does_not_deny_what_there_is(
    file: StateFile, tmp_path: Path, meters: Meters
) -> None:
    spoil(file)
    directory = Directory(StateSource(file, "embedded"))
    directory.refresh()
    node_link = NodeLink(configured(data_dir=str(tmp_path)), meters)
    pool = ReplicaPool(
        directory, node_link, RemoteReplicas(configured()), meters, QueueSettings(), workers=1, retire_secs=1
    )
    with pytest.raises(Problem) as caught:
        pool.ready(Target(instance_name="a"))
    assert caught.value.code == "STATE_UNREADABLE"
    with pytest.raises(Refusal) as refused:
        _ = InstanceSelector(directory).instances
    assert refused.value.reason is Reason.UNAVAILABLE
    for path in (file.path, file.good):
        path.unlink()
    file.update(lambda before: state.add(before, spec("a"), configured(), (), now()))
    assert list(InstanceSelector(directory).instances) == ["a"]


class Held(Table):
    """A table that takes its time when it is compared, as a thread may that has lost its turn."""

    def __init__(self, begun: threading.Event, go_on: threading.Event) -> None:
        super().__init__()
        object.__setattr__(self, "events", (begun, go_on))

    def __eq__(self, other: object) -> bool:
        begun, go_on = self.__dict__["events"]
        begun.set()
        go_on.wait(20)
        return False

    __hash__ = None  # type: ignore[assignment]


class TwoContents:
    """The first content is compared slowly."""

    def __init__(self, path: Path, first: Table, second: Table) -> None:
        self.path = path
        self.absent: Problem | None = None
        self.tables = [first, second]

    def content(self) -> Content:
        return Content(State(), self.tables.pop(0), {})


def test_of_two_that_look_the_slower_one_does_not_put_back_what_was_before(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    newest = Table(elsewhere=(Route("a", "org/a", "running", ()),))
    path = tmp_path / "file"
    path.write_text("1")
    directory = Directory(TwoContents(path, Held(begun, go_on), newest))
    slower, faster = (threading.Thread(target=directory.refresh) for _ in range(2))
    slower.start()
    assert begun.wait(20)
    path.write_text("22")
    faster.start()
    faster.join(0.5)  # with the lock it waits for the slower one
    go_on.set()
    slower.join(20)
    faster.join(20)
    directory.refresh()
    assert directory.table is newest
