"""What is looked up once for all instances is looked up once, however many there are."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from appliance.core import placement, state
from appliance.core.status import Process
from appliance.drivers.healthfile import HealthFile, Probes
from appliance.drivers.needsfile import NeedsFile
from appliance.drivers.supervisord import Supervisor
from appliance.node import overview
from appliance.node.context import Node, now
from testing.specs import configured, spec


class Counted:
    """A supervisord without processes, and a health file, that count how often they are asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def processes(self) -> list[Process]:
        self.asked["processes"] += 1
        return [Process("monitor", "monitor", "RUNNING", started=1.0, now=2.0)]

    def members(self, group: str, names: list[str]) -> list[Process]:
        self.asked[group] += 1
        return []

    def read(self) -> Probes:
        self.asked["health"] += 1
        return Probes({name: {"launch": 1, "replicas": {"0": {"failures": 3, "checked_at": name}}} for name in "ab"})

    def written_at(self) -> float | None:
        return None


class CountedLoads:
    """For how long workloads loaded; each was the same time."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> dict[str, float]:
        self.reads += 1
        return {placement.workload(spec("any")): 1.5}


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def node(tmp_path: Path, counted: Counted) -> Node:
    settings = replace(configured(), data_dir=str(tmp_path), state_file=str(tmp_path / "state.toml"))
    node = replace(
        Node.at(settings),
        supervisor=cast(Supervisor, counted),
        health=cast(HealthFile, counted),
        load_times=cast(NeedsFile[float], CountedLoads()),
    )
    for name in ("a", "b", "c"):
        node.state.update(lambda before, name=name: state.add(before, spec(name), settings, (), now()))
    return node


def test_all_instances_are_shown_by_one_look(node: Node, counted: Counted) -> None:
    shown = overview.show_all(node)
    assert counted.asked == {"processes": 1, "health": 1}
    assert [(each.name, each.status, each.last_health_check) for each in shown] == [
        ("a", "starting", "a"),
        ("b", "starting", "b"),
        ("c", "starting", None),
    ]
    assert [each.load_secs for each in shown] == [1.5] * 3
    assert cast(CountedLoads, node.load_times).reads == 1


def test_one_instance_is_shown_without_a_look_at_the_processes_of_others(node: Node, counted: Counted) -> None:
    assert overview.show(node, "b").health_check_failures == 3
    assert counted.asked == {"b": 1, "health": 1}


def test_health_asks_supervisord_once(node: Node, counted: Counted) -> None:
    assert overview.health(node).total == 3
    assert counted.asked["processes"] == 1
