"""How often the memory of processes is looked at: the kernel keeps the peak of each."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from appliance.core.state import State
from appliance.monitor.machine import PEAK_SECS, MachineWatch
from appliance.node.context import Node
from testing.specs import configured


def test_a_peak_is_taken_when_a_process_answers_and_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[set[int]] = []

    def keep_peaks(node: Node, state: State, table: Any, answering: Collection[int]) -> None:
        looked_at.append(set(answering))

    def cannot(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("appliance.monitor.machine.keep_peaks", keep_peaks)
    node = Node.at(configured(data_dir=str(tmp_path)))
    watch, state, secs = MachineWatch(node), node.state.read(), node.settings.health_check_interval_secs
    for at, answering in ((0.0, {7}), (secs / 2, {7, 8}), (secs, {7, 8}), (2 * secs, {8}), (PEAK_SECS, {8})):
        watch.measure(at, state, [], answering)
    assert looked_at == [{7}, {8}, set(), {8}], "memory of GPUs is measured each time"
    with monkeypatch.context() as full:
        full.setattr("appliance.monitor.machine.keep_peaks", cannot)
        watch.measure(2 * PEAK_SECS, state, [], {8})
    watch.measure(2 * PEAK_SECS + secs, state, [], {8})
    assert looked_at[-1] == {8}, "what could not be kept is taken again"
