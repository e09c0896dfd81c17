"""Rates and quantiles between two looks, and means in which what was not measured does not count."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import series
from appliance.core.series import COARSE, FINE, NAMES, NOTHING, Counts, Moment, measured

INF = math.inf
SEEN = Moment(memory_mib=12.5, gpu_mib=math.nan, ready=2, golden_distance=0.25)
BEFORE = Counts(texts=100, calls=10, errors=1, hits=40, queue=3, durations={0.1: 8, 1.0: 10, INF: 10})
NOW = Counts(texts=300, calls=30, errors=2, hits=140, queue=5, durations={0.1: 18, 1.0: 28, INF: 30})


def happened(before: Counts, now: Counts) -> Counts:
    found = now.since(before)
    assert found is not None
    return found


def test_a_row_is_what_happened_in_a_second() -> None:
    row = measured(happened(BEFORE, NOW), NOW.queue, 10, SEEN)
    assert (row.texts, row.calls, row.errors, row.hits, row.queue) == (20, 2, 0.1, 10, 5)
    assert (row.memory_mib, row.ready, row.golden_distance) == (12.5, 2, 0.25)
    assert row.p50_ms == pytest.approx(100)
    assert row.p95_ms == pytest.approx(1000)


@pytest.mark.parametrize(("known", "secs"), [(None, 10.0), (NOW, 0.0)])
def test_without_a_look_before_only_what_is_now_is_known(known: Counts | None, secs: float) -> None:
    row = measured(known, 5, secs, SEEN)
    assert all(math.isnan(value) for value in row[:6])
    assert row[6:] == (5, *SEEN)


@pytest.mark.parametrize("counter", series.COUNTERS)
def test_whoever_counts_less_than_before_began_anew(counter: str) -> None:
    assert NOW.since(replace(NOW, **{counter: getattr(NOW, counter) + 1})) is None
    assert NOW.since(NOW) == replace(Counts(), queue=NOW.queue, durations=dict.fromkeys(NOW.durations, 0.0))


def test_two_ways_of_calls_are_added_up_whatever_their_buckets() -> None:
    lane = Counts(texts=5, calls=6, errors=1, durations={0.25: 3, 2.5: 6, INF: 6})
    both = NOW + lane
    assert (both.texts, both.calls, both.errors, both.queue) == (305, 36, 3, 5)
    assert both.durations == {0.1: 18, 0.25: 21, 1.0: 31, 2.5: 34, INF: 36}
    assert Counts() + NOW == NOW


def test_without_a_call_there_is_no_latency() -> None:
    row = measured(happened(NOW, NOW), 0, 10, SEEN)
    assert (row.texts, row.calls) == (0, 0)
    assert math.isnan(row.p50_ms)


@given(st.lists(st.tuples(*[st.floats(0, 1e6) | st.just(math.nan)] * 3), max_size=20))
def test_a_mean_lies_between_what_was_measured(rows: list[tuple[float, ...]]) -> None:
    found = series.mean(rows)
    for place, value in enumerate(found[:3]):
        known = [row[place] for row in rows if not math.isnan(row[place])]
        assert math.isnan(value) if not known else min(known) * 0.999 <= value <= max(known) * 1.001


@given(st.integers(0, 500), st.integers(1, 50))
def test_rows_are_thinned_to_so_many_and_keep_their_order(count: int, most: int) -> None:
    rows = [(float(number),) for number in range(count)]
    found = series.thinned(rows, most)
    assert len(found) <= most
    assert found == sorted(found)


def test_a_day_is_fine_and_more_is_coarse() -> None:
    assert (series.ring_for(24 * 3600), series.ring_for(24 * 3600 + 1)) == (FINE, COARSE)
    assert len(NOTHING) == len(NAMES)
