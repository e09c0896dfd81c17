"""Room on a GPU for an instance of which nothing runs: what is in quarantine holds nothing, and asks for room anew."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core import repairs, sleep, state
from appliance.core.placement import Device, workload
from appliance.core.state import State
from appliance.core.status import Process
from appliance.drivers.listeners import ListenerTable
from appliance.node import gpus
from appliance.node import room as rooms
from appliance.operations import room
from testing.specs import configured, spec

GIB = 1024**3
SETTINGS, NOW = configured(), "2026-01-01T00:00:00.000Z"
BROKEN, IDLE = spec("x", model_id="org/x", gpu_id=0), spec("y", model_id="org/y", gpu_id=0, start="on_demand")
NEEDS = {workload(BROKEN): 12 * GIB, workload(IDLE): 20 * GIB}
DEVICE = Device(0, "GPU-0", "L4", 24 * GIB, 20 * GIB, 4 * GIB, 0.0, 40)  # y has its 20 GiB


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    current = state.add(State(), BROKEN, SETTINGS, (), NOW)
    current = sleep.wake(state.add(current, IDLE, SETTINGS, (), NOW), "y")
    current = repairs.quarantine(current, "x", 0, 1, "CUDA error")
    process = Process("y", "y-0", "RUNNING", pid=1, started=1.0, now=1000.0, age=999.0)
    for module in (rooms, gpus):
        monkeypatch.setattr(module, "nvml", SimpleNamespace(devices=lambda: [DEVICE], memory_by_process=list))
    monkeypatch.setattr(rooms, "estimated", lambda _: GIB)
    return SimpleNamespace(
        settings=SETTINGS,
        state=SimpleNamespace(read=lambda: current),
        needs=SimpleNamespace(read=lambda: NEEDS),
        memory_needs=SimpleNamespace(read=dict),
        supervisor=SimpleNamespace(processes=lambda: [process]),
        layout=SimpleNamespace(activity=str(tmp_path / "none"), room_lock=str(tmp_path / "room.lock")),
        listening=lambda: ListenerTable({}),
        proved=lambda instance, replica, table=None: instance.name == "y",
    )


def test_a_start_of_what_is_in_quarantine_makes_room(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = node.state.read()
    assert room.giving_way(node, current, current.get("x")) == ("y",)
    asked: list[Any] = []
    monkeypatch.setattr(room, "make", lambda *arguments: asked.append(arguments))
    with room.made_for(node, current.get("x")):
        assert len(asked) == 1
    with room.made_for(node, current.get("y")):
        assert len(asked) == 1, "it has its room"
