"""Rows of series from two ways of calls, one of which does not always answer."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.core.series import NAMES, Counts
from appliance.core.settings import Settings
from appliance.core.state import State
from appliance.drivers import metrics
from appliance.drivers.seriesfile import SeriesFile
from appliance.monitor import recording
from appliance.monitor.golden import Golden
from appliance.monitor.recording import Recording
from appliance.node import express_metrics
from appliance.node.context import Node
from testing.specs import instance, spec

BEGAN = 1_700_000_000.0


class Wall:
    """The time of day."""

    def __init__(self) -> None:
        self.now = BEGAN

    def time(self) -> float:
        return self.now


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    made = Wall()
    monkeypatch.setattr(recording, "time", made)
    return made


def rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall: Wall, looks: Sequence[tuple[float, float | None]]
) -> Any:
    """Texts a second, of looks ten seconds apart: how many the multiplexers have counted, and Envoy, or None."""
    node = Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))
    one = Recording(node, Golden(tmp_path / "golden", lambda instance: {}))
    state = State(instances={"a": instance(spec("a", express=True))})
    found = []
    for number, (counted, by_lane) in enumerate(looks):
        wall.now = BEGAN + 10 * number
        lane = None if by_lane is None else {"a": Counts(texts=by_lane, calls=by_lane)}
        table = {"a": Counts(texts=counted, calls=counted)}
        monkeypatch.setattr(metrics, "counts_by_instance", lambda folder, table=table: table)
        monkeypatch.setattr(express_metrics, "counts_by_instance", lambda node, lane=lane: lane)
        one.look(10.0 * number, state, [], [])
        row = SeriesFile(Path(node.layout.series) / "a").newest(wall.now)
        value = row[NAMES.index("texts")]
        found.append(None if math.isnan(value) else value)
    return found


def test_an_envoy_that_was_silent_for_a_moment_is_no_burst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall: Wall
) -> None:
    looks = [(0.0, 50_000.0), (10.0, 50_100.0), (20.0, None), (30.0, 50_300.0), (40.0, 50_400.0)]
    assert rates(tmp_path, monkeypatch, wall, looks) == [None, 11.0, 1.0, 1.0, 11.0]


def test_an_envoy_that_began_anew_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall: Wall
) -> None:
    looks = [(0.0, 50_000.0), (100.0, 10.0), (200.0, 30.0)]
    assert rates(tmp_path, monkeypatch, wall, looks) == [None, 10.0, 12.0]
