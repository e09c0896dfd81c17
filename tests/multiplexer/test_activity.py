"""When instances were used last, of those alone that sleep when nobody uses them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.instance import InstanceSpec
from appliance.core.routing import Replica
from appliance.core.state import Instance
from appliance.drivers.activityfile import ActivityFile, read
from appliance.multiplexer.activity import Activity


def instances(**starts: str) -> dict[str, Instance]:
    """start: of each instance by its name."""
    return {
        name: Instance(InstanceSpec(name, "org/one", start=start), (1,), (2,), created_at="now")
        for name, start in starts.items()
    }


class Used:
    """Replicas, of which a test says how often each has computed something."""

    def __init__(self, *names: str) -> None:
        self.backends: dict[Replica, Any] = {
            Replica(name, 0, f"127.0.0.1:{port}", "org/one", 1, 8): SimpleNamespace(taken=0, outstanding=0)
            for port, name in enumerate(names, start=1)
        }

    def take(self, name: str) -> None:
        (its,) = (each for replica, each in self.backends.items() if replica.instance == name)
        its.taken += 1


@pytest.fixture
def file(tmp_path: Path) -> ActivityFile:
    return ActivityFile(tmp_path / "activity" / "0.json")


def test_which_instances_matter_follows_the_state(file: ActivityFile) -> None:
    activity, used = Activity(file, list), Used("first", "second")
    before = instances(first="on_demand", second="eager")
    activity.note(before, used.backends, at_once=True)
    for name in ("first", "second"):
        used.take(name)
    activity.note(before, used.backends, at_once=True)
    assert [name for name, _ in read(file.path)] == ["first"]
    after = instances(first="eager", second="on_demand")
    activity.note(after, used.backends, at_once=True)
    used.take("second")
    activity.note(after, used.backends, at_once=True)
    assert [name for name, _ in read(file.path)] == ["second"]


def test_where_none_matters_nothing_is_written(file: ActivityFile) -> None:
    activity, used = Activity(file, list), Used("first")
    used.take("first")
    activity.note(instances(first="eager"), used.backends, at_once=True)
    assert not file.path.exists()
