"""Verbs and repairs beside a change of another process, and on a disk that takes no more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.control.__main__ import finish
from appliance.core import generations, state
from appliance.core.events import Cause
from appliance.core.health import Look
from appliance.core.instance import InstanceSpec
from appliance.core.port_choice import Ports
from appliance.core.problems import Kind, Problem
from appliance.core.state import State
from appliance.core.status import Process
from appliance.drivers.supervisord import Supervisor
from appliance.node import overview
from appliance.node.context import Node, now
from appliance.operations import instances, models, repairs, replacement, sleep, supervision
from testing.running import TINY
from testing.specs import configured

PID = 4711
Change = Callable[[State], State]


class Signals:
    """A supervisord that does what it is told, and remembers it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def require(self) -> None:
        pass

    def answers(self) -> bool:
        return False

    def processes(self) -> list[Process]:
        return []

    def members(self, *_: Any) -> list[Process]:
        return []

    def difference(self) -> tuple[list[str], list[str], list[str]]:
        return [], [], []

    def process(self, group: str, name: str) -> Process:
        return Process(group, name, "RUNNING", pid=PID)

    def signal(self, *what: Any) -> None:
        self.sent.append(what)

    def stop(self, *what: Any) -> None:
        self.sent.append((*what, "stop"))


@pytest.fixture
def supervisor() -> Signals:
    return Signals()


@pytest.fixture
def node(tmp_path: Path, supervisor: Signals) -> Node:
    made = replace(Node.at(configured(data_dir=str(tmp_path))), supervisor=cast(Supervisor, supervisor))
    made.state.update(lambda before: state.add(before, wanted(), made.settings, (), now()))
    return made


def wanted(**fields: Any) -> InstanceSpec:
    return InstanceSpec.parse({"name": "a", "model_id": str(TINY), **fields})


def meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Another process commits a change when the next verb has read the state."""
    read = node.state.read

    def read_once() -> State:
        before = read()
        monkeypatch.setattr(node.state, "read", read)
        Node.at(node.settings).state.update(change)
        return before

    monkeypatch.setattr(node.state, "read", read_once)


def fill_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Change) -> None:
        raise Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", "No space left on device")

    monkeypatch.setattr(node.state, "update", refuse)


def test_an_undo_beside_a_take_over_undoes_that(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    other = wanted(max_batch_tokens=77)
    ports = Ports((8090,), (8790,))
    begun = node.state.update(lambda before: generations.begin(before, "a", other, ports, (), False)).after
    successor = begun.get("a").successor
    assert successor
    meanwhile(node, monkeypatch, lambda before: generations.take_over(before, "a", successor.launch, 0.0))
    replacement.undo(node, "a")
    after = node.state.read().get("a")
    assert after.spec == other
    assert after.successor
    assert after.successor.spec == wanted()


def test_of_two_who_give_up_a_successor_none_goes_further_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds it gone: the generation before the one that is called was not meant."""
    first, second = wanted(max_batch_tokens=77), wanted(max_batch_tokens=88)
    current = node.state.read().get("a")
    ports = Ports(current.ports, current.prometheus_ports)
    node.state.update(lambda before: generations.replace_spec(before, "a", first, ports, ()))
    node.state.update(lambda before: generations.prove(before, "a", before.get("a").launch))
    beside = Ports((8090,), (8790,))
    successor = node.state.update(lambda before: generations.begin(before, "a", second, beside, (), False)).after
    launch = successor.get("a").generations[1].launch
    meanwhile(node, monkeypatch, lambda before: generations.drop(before, "a", launch))
    replacement.undo(node, "a")
    after = node.state.read().get("a")
    assert (after.spec, after.successor) == (first, None)


def test_a_sleep_beside_a_restart_is_a_sleep(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(node, monkeypatch, lambda before: state.restart(before, "a"))
    assert sleep.sleep(node, "a").instance.sleeping
    assert node.state.read().get("a").sleeping


def test_on_a_full_disk_a_replica_that_hangs_is_ended_all_the_same(
    node: Node, supervisor: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = node.state.read().get("a")
    fill_disk(node, monkeypatch)
    repairs.replace_process(node, instance, 0, PID, Cause.MISSED_PROBES, "it missed 3 probes")
    assert supervisor.sent == [("a", instance.process(0), "KILL")]
    repairs.note_death(node, instance, 0, "ended with status 1")
    assert [each["event"] for each in node.journal.since(0)] == ["restarted", "died"]


def test_on_a_full_disk_a_replica_that_answers_wrongly_is_stopped_all_the_same(
    node: Node, supervisor: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = node.state.read().get("a")
    supervision.apply_sections(node)
    fill_disk(node, monkeypatch)
    look = Look(instance.launch, "RUNNING", pid=PID)
    with pytest.raises(Problem, match="No space left"):
        repairs.quarantine(node, instance, 0, look, "its answers are wrong")
    assert supervisor.sent == [("a", instance.process(0), "stop")]


def test_what_supervisord_cannot_be_told_is_not_created(node: Node) -> None:
    """The small state file was written, and the larger include file found no room."""
    Path(f"{node.layout.instances_conf}.new").mkdir()
    with pytest.raises(Problem, match="Cannot write") as caught:
        instances.create(node, {"name": "late", "model_id": str(TINY)})
    assert (caught.value.kind, caught.value.code) == (Kind.EXHAUSTED, "STATE_WRITE_FAILED")
    assert set(node.state.read().instances) == {"a"}
    finish(node)  # control starts, and its /health says why


def test_what_was_replaced_for_good_holds_no_ports_and_an_undo_finds_others(node: Node) -> None:
    ports = Ports((8090,), (8790,))
    begun = node.state.update(lambda now_: generations.begin(now_, "a", wanted(max_batch_tokens=9), ports, (), False))
    (old,), successor = begun.after.get("a").ports, begun.after.get("a").successor
    assert successor
    node.state.update(lambda now_: generations.take_over(now_, "a", successor.launch, 5.0))
    kept = node.state.read().get("a").predecessor
    assert kept
    assert old in node.state.read().taken_ports
    node.state.update(lambda now_: generations.drop(now_, "a", kept.launch))
    node.state.update(lambda now_: state.stop(now_, "a"))
    other = InstanceSpec.parse({"name": "b", "model_id": str(TINY)})
    node.state.update(lambda now_: state.add(now_, other, node.settings, (), now()))
    assert node.state.read().get("b").ports == (old,)
    replacement.undo(node, "a", "in_place")
    after = node.state.read().get("a")
    assert after.spec == wanted()
    assert after.ports == (8090,)


def test_what_may_come_back_by_itself_keeps_its_ports(node: Node) -> None:
    """In place: the one before comes back if the new one does not answer."""
    before = node.state.read().get("a")
    changed = wanted(port=8095, prometheus_port=8795)
    after = node.state.update(replacement.replacing(node, before, changed)).after
    assert after.taken_ports.keys() == {*before.ports, *before.prometheus_ports, 8095, 8795}
    proved = generations.prove(after, "a", after.get("a").launch)
    assert proved.taken_ports.keys() == {8095, 8795}


def test_the_model_of_what_may_come_back_by_itself_is_in_use(node: Node) -> None:
    """It was deleted, and what came back had no model."""
    before = node.state.read().get("a")
    other = wanted(model_id="org/new")
    ports = Ports(before.ports, before.prometheus_ports)
    node.state.update(lambda now_: generations.replace_spec(now_, "a", other, ports, ()))
    for model_id in (str(TINY), "org/new"):
        with pytest.raises(Problem, match="is used by a: delete the instance first") as caught:
            models.refuse_used(node, model_id)
        assert caught.value.code == "MODEL_IN_USE"
    launch = node.state.read().get("a").launch
    node.state.update(lambda now_: generations.prove(now_, "a", launch))
    models.refuse_used(node, str(TINY))  # an undo asks for it, and refuses


def test_what_came_back_by_itself_says_why(node: Node) -> None:
    before = node.state.read().get("a")
    ports = Ports(before.ports, before.prometheus_ports)
    node.state.update(lambda now_: generations.replace_spec(now_, "a", wanted(max_batch_tokens=77), ports, ()))
    replacement.set_fields(node, "a", {"aliases": ["embedder"]}, whole=False)
    replacement.fall_back(node, "a", node.state.read().get("a").launch, "it died 5 times")
    after = overview.show(node, "a")
    assert after.instance.spec == wanted(aliases=["embedder"])
    assert "it died 5 times" in (after.last_error or "")
