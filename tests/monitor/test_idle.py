"""Who is put to sleep for want of calls, whatever happens to the clock."""

from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from appliance.core.settings import Settings
from appliance.core.state import State, with_instance
from appliance.drivers.activityfile import ActivityFile, LastUse
from appliance.monitor.idle import IdleWatch
from appliance.node.context import Node
from testing.specs import instance, spec

IDLE_SECS = 600


class Sleepers(Executor):
    """Nobody goes to sleep; who was to go is remembered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def submit(self, _: Any, /, *arguments: Any, **__: Any) -> Future[Any]:
        self.names.append(arguments[0].instance)
        return Future()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.offset = 0.0, 0.0
        monkeypatch.setattr("appliance.monitor.idle.time.monotonic", lambda: 1000.0 + self.passed)
        monkeypatch.setattr("appliance.monitor.idle.time.time", lambda: 1.8e9 + self.passed + self.offset)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))


def test_a_clock_that_is_set_ahead_puts_nobody_to_sleep(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleepers = Clock(monkeypatch), Sleepers()
    file = ActivityFile(Path(node.layout.activity, "multiplexer-0.json"))
    state = with_instance(State(), instance(spec("a", idle_unload_secs=IDLE_SECS)))
    watch = IdleWatch(node, sleepers)

    def after(secs: float) -> list[str]:
        clock.passed += secs
        watch.look(state, {"a"})
        return sleepers.names

    assert after(0) == []
    file.write({"a": LastUse(1.8e9, busy=False)})
    clock.offset = 3600
    assert after(IDLE_SECS - 10) == [], "an hour seemed to have passed"
    file.write({"a": LastUse(1.8e9 + 3600 + clock.passed, busy=False)})
    assert after(5) == []
    assert after(IDLE_SECS - 1) == [], "it was called"
    assert after(2) == ["a"]
