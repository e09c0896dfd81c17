"""Series as lines, which break where nothing was measured."""

import math

import pytest

from appliance.control.console import charts
from appliance.core.series import NAMES, NOTHING, Measured
from appliance.node.series import SeriesView

NAN = math.nan


def view(*texts: float) -> SeriesView:
    rows = tuple((value, *NOTHING[1:]) for value in texts)
    return SeriesView(10, 1000.0, rows)


def test_a_line_breaks_where_nothing_was_measured() -> None:
    assert charts.path_of([0.0, 5.0, NAN, 10.0], 10.0) == "M0.0 120.0h0.1L200.0 60.0M600.0 0.0h0.1"
    assert charts.path_of([], 1.0) == charts.path_of([NAN], 1.0) == ""


@pytest.mark.parametrize(("value", "edge"), [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.1, 2.0), (42, 50), (600, 1000)])
def test_the_upper_edge_is_a_round_number(value: float, edge: float) -> None:
    assert charts.rounded_up(value) == edge


def test_each_chart_says_its_last_value() -> None:
    found = {chart.title: chart for chart in charts.charts_of(view(1.0, 7.5, NAN))}
    assert (found["Texts a second"].latest, found["Texts a second"].high) == ("texts 7.5", "10")
    assert found["Latency"].latest == "p50 - ms, p95 - ms"
    assert found["Memory"].latest == "memory - MiB, on GPUs - MiB"
    memory = SeriesView(10, 1000.0, (Measured(*NOTHING)._replace(memory_mib=7.0),))
    assert [chart.latest for chart in charts.charts_of(memory) if chart.title == "Memory"] == ["memory 7 MiB"]
    shown = {name for sketch in charts.SKETCHES for name in sketch.columns}
    assert shown == set(NAMES)
    assert found["From the golden answers (1 - cosine)"].high == "0.001", "so that noise does not look like news"


def test_what_was_not_measured_is_null() -> None:
    mapping = view(1.0, NAN).mapping()
    assert (mapping["texts"], mapping["calls"], mapping["step_secs"]) == ([1.0, None], [None, None], 10)
    assert (mapping["since"], mapping["until"]) == ("1970-01-01T00:16:20.000Z", "1970-01-01T00:16:40.000Z")
