"""Who asks for room, and when: before anybody is put to sleep, also for a dry run and for what is in quarantine."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.core import repairs, state
from appliance.core import sleep as core_sleep
from appliance.core.instance import InstanceSpec
from appliance.core.placement import workload
from appliance.core.problems import Kind, Problem
from appliance.core.status import Process
from appliance.drivers.supervisord import Supervisor
from appliance.node.context import Node, now
from appliance.operations import instances, replacement, restarts, sleep
from testing.running import TINY
from testing.specs import configured
from testing.stand_ins import QuietSupervisor

MIB = 1024**2
LIMIT_MB = 1000


class Started(QuietSupervisor):
    """A supervisord that has a process for each replica that shall run, since long ago."""

    node: Node

    def processes(self) -> list[Process]:
        run = [each for each in self.node.state.read().generations if each.wanted == "running"]
        return [
            Process(each.name, each.process(replica), "RUNNING", pid=1, started=1.0, now=90.0, age=89.0)
            for each in run
            for replica in range(each.spec.replicas)
            if replica not in each.quarantined
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    supervisor = Started()
    settings = configured(data_dir=str(tmp_path), memory_limit_mb=LIMIT_MB)
    supervisor.node = replace(Node.at(settings), supervisor=cast(Supervisor, supervisor))
    return supervisor.node


def wanted(name: str, **fields: Any) -> InstanceSpec:
    return InstanceSpec.parse({"name": name, "model_id": str(TINY), **fields})


def add(node: Node, *specs: InstanceSpec) -> None:
    for spec in specs:
        node.state.update(lambda before, spec=spec: state.add(before, spec, node.settings, (), now()))


def takes(node: Node, needs: dict[InstanceSpec, int]) -> None:
    node.memory_needs.raise_to({workload(spec): megabytes * MIB for spec, megabytes in needs.items()})


def refusal(verb: Callable[[], object]) -> tuple[Kind, str, str]:
    with pytest.raises(Problem) as caught:
        verb()
    return caught.value.kind, caught.value.code, caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that somebody may break."""
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def test_what_cannot_be_served_wakes_nobody_and_puts_nobody_to_sleep(node: Node, folder: Path) -> None:
    """Every call for it ended the other one's processes, and was refused then."""
    broken = wanted("x", model_id=str(folder), start="on_demand")
    idle = wanted("y", start="on_demand", max_batch_tokens=999)
    takes(node, {broken: 600, idle: 600})
    add(node, broken, idle)
    node.state.update(lambda before: core_sleep.wake(before, "y"))
    (folder / "tokenizer.json").rename(folder / "aside")
    assert "tokenizer.json" in refusal(lambda: sleep.wake(node, "x"))[2]
    assert [each.sleeping for each in node.state.read().instances.values()] == [True, False]
    (folder / "aside").rename(folder / "tokenizer.json")
    sleep.wake(node, "x")
    assert [each.sleeping for each in node.state.read().instances.values()] == [False, True]


@pytest.mark.parametrize("body", [{"replicas": 3}, {"max_batch_tokens": 999}], ids=["scale", "in place"])
def test_a_dry_run_is_refused_where_there_is_no_room(node: Node, body: dict[str, Any]) -> None:
    """It was answered as if there were, and the change itself was refused."""
    takes(node, {wanted("a"): 400, wanted("a", max_batch_tokens=999): LIMIT_MB + 1})
    add(node, wanted("a"))
    before = node.state.read()
    dry = refusal(lambda: replacement.set_fields(node, "a", body, False, dry_run=True))
    assert dry[1] == "INSUFFICIENT_MEMORY"
    assert dry == refusal(lambda: replacement.set_fields(node, "a", body, False))
    assert node.state.read() == before


@pytest.mark.parametrize("body", [{"replicas": 2}, {"max_batch_tokens": 999}], ids=["scale", "in place"])
def test_a_dry_run_is_answered_where_there_is_room_and_puts_nobody_to_sleep(node: Node, body: dict[str, Any]) -> None:
    idle = wanted("y", start="on_demand", max_batch_tokens=998)
    takes(node, {wanted("a"): 400, wanted("a", max_batch_tokens=999): 800, idle: 500})
    add(node, wanted("a"), idle)
    node.state.update(lambda before: core_sleep.wake(before, "y"))
    before = node.state.read()
    replacement.set_fields(node, "a", body, False, dry_run=True)
    assert node.state.read() == before


def test_of_what_is_stopped_a_dry_run_asks_for_no_room(node: Node) -> None:
    takes(node, {wanted("a", max_batch_tokens=999): LIMIT_MB + 1})
    add(node, wanted("a"))
    node.state.update(lambda before: state.stop(before, "a"))
    view = replacement.set_fields(node, "a", {"max_batch_tokens": 999}, False, dry_run=True)
    assert (view.status, view.instance.spec.max_batch_tokens) == ("stopped", 999)


def quarantined(node: Node) -> None:
    """One of two, beside which the other one runs."""
    add(node, wanted("a", replicas=2))
    node.state.update(lambda before: repairs.quarantine(before, "a", 0, 1, "it died 5 times"))


def test_a_rolling_restart_of_what_is_in_quarantine_asks_for_room(node: Node) -> None:
    """Its process ran beside what had come into its room meanwhile, over the limit."""
    other = wanted("b", max_batch_tokens=999)
    takes(node, {wanted("a", replicas=2): 400, other: 500})
    quarantined(node)
    add(node, other)
    before = node.state.read()
    restart = refusal(lambda: restarts.restart(node, "a"))
    assert restart[1] == "INSUFFICIENT_MEMORY"
    assert restart == refusal(lambda: instances.start(node, "a"))
    assert node.state.read() == before


def test_a_rolling_restart_of_what_is_in_quarantine_puts_an_idle_one_to_sleep(node: Node) -> None:
    idle = wanted("y", start="on_demand", max_batch_tokens=999)
    takes(node, {wanted("a", replicas=2): 400, idle: 500})
    quarantined(node)
    add(node, idle)
    node.state.update(lambda before: core_sleep.wake(before, "y"))
    restarts.restart(node, "a")
    after = node.state.read()
    assert after.get("y").sleeping
    assert (dict(after.get("a").rolling), dict(after.get("a").quarantined)) == ({0: 0, 1: 0}, {})


def test_a_lock_that_cannot_be_made_is_a_disk_that_takes_no_more(node: Node) -> None:
    """It was a 500 with a traceback in the log."""
    takes(node, {wanted("b"): 100})
    locks = Path(node.layout.room_lock).parent
    locks.write_text("")  # whoever makes the folder of the locks is refused, root too
    kind, code, message = refusal(lambda: instances.create(node, {"name": "b", "model_id": str(TINY)}))
    assert (kind, code) == (Kind.EXHAUSTED, "STATE_WRITE_FAILED")
    assert message.startswith(f"Cannot write {node.layout.room_lock}: ")
    assert not node.state.read().instances
    locks.unlink()
    locks.mkdir()
    Path(node.layout.room_lock).mkdir()
    assert refusal(lambda: instances.create(node, {"name": "b", "model_id": str(TINY)}))[1] == "STATE_WRITE_FAILED"
