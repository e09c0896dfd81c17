"""Two rings of rows: what was written is read at its time, what was not is nothing, and the file never grows."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.core import series
from appliance.core.series import COARSE, FINE, NAMES, NOTHING, Row
from appliance.drivers.seriesfile import MOST_AHEAD, SeriesFile

BEGIN = 1_800_000_000.0  # a whole number of both rings' rows


def row(value: float) -> Row:
    return (value,) * len(NAMES)


def values(rows: list[Row]) -> list[float | None]:
    return [None if math.isnan(each[0]) else each[0] for each in rows]


@pytest.fixture
def file(tmp_path: Path) -> SeriesFile:
    return SeriesFile(tmp_path / "series" / "a")


def test_rows_are_read_at_their_time(file: SeriesFile) -> None:
    for number in (0, 1, 4):
        file.append(BEGIN + 10 * number + 3, row(number))
    assert values(file.read(FINE, BEGIN - 20, BEGIN + 70)) == [None, None, 0, 1, None, None, 4, None, None]
    assert file.newest(BEGIN + 60)[0] == 4
    assert file.newest(BEGIN + 160) == pytest.approx(NOTHING, nan_ok=True), "it is not of this minute"
    size = file.path.stat().st_size
    file.append(BEGIN + 44, row(9))  # the same ten seconds, and a little earlier
    file.append(BEGIN, row(9))
    assert values(file.read(FINE, BEGIN, BEGIN + 50)) == [0, 1, None, None, 4]
    assert file.path.stat().st_size == size


def test_what_is_a_round_old_is_written_over_and_nothing_of_it_seems_new(file: SeriesFile) -> None:
    file.append(BEGIN, row(1))
    later = BEGIN + FINE.secs * (FINE.rows + 5)
    file.append(later, row(2))
    assert values(file.read(FINE, later - 60, later + 10)) == [None] * 6 + [2]
    assert values(file.read(FINE, BEGIN, BEGIN + 10)) == [None]
    found = values(file.read(FINE, later - FINE.secs * FINE.rows, later + 10))
    assert [each for each in found if each is not None] == [2]


def test_five_minutes_become_one_mean(file: SeriesFile) -> None:
    for number in range(2 * series.PER_MEAN + 1):
        file.append(BEGIN + 10 * number, row(number))
    assert values(file.read(COARSE, BEGIN, BEGIN + 900)) == [14.5, 44.5, None]


def test_after_a_pause_the_means_go_on(file: SeriesFile) -> None:
    for at in (0, 10, 400_000, 400_310):
        file.append(BEGIN + at, row(at))
    found = values(file.read(COARSE, BEGIN, BEGIN + 400_500))
    assert {each for each in found if each is not None} <= {5.0, 400_000.0}
    assert found[-2] == 400_000


def test_a_file_that_is_none_is_nothing_and_made_anew(file: SeriesFile) -> None:
    assert values(file.read(FINE, BEGIN, BEGIN + 30)) == [None] * 3
    file.path.parent.mkdir()
    for content in (b"", b"nonsense" * 100):
        file.path.write_bytes(content)
        assert values(file.read(FINE, BEGIN, BEGIN + 30)) == [None] * 3
        file.append(BEGIN, row(1))
        assert values(file.read(FINE, BEGIN, BEGIN + 30)) == [1, None, None]


@settings(deadline=None)  # the disk may be slow
@given(
    st.lists(st.integers(0, 3 * FINE.rows), min_size=1, max_size=12), st.integers(0, 3 * FINE.rows), st.integers(1, 50)
)
def test_the_last_round_is_what_was_written_of_it(numbers: list[int], first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = SeriesFile(Path(folder) / "a")
        kept: dict[int, float] = {}
        for number in numbers:
            file.append(BEGIN + 10 * number, row(number))
            if kept and max(kept) > number + MOST_AHEAD:  # the clock was set back
                kept = {each: value for each, value in kept.items() if each < number}
            if not kept or number > max(kept):
                kept = {each: value for each, value in kept.items() if each > number - FINE.rows}
                kept[number] = float(number)
        newest = max(kept)
        expected = [
            kept.get(each) if newest - FINE.rows < each <= newest else None for each in range(first, first + count)
        ]
        assert values(file.read(FINE, BEGIN + 10 * first, BEGIN + 10 * (first + count))) == expected


def test_a_clock_that_is_set_back_costs_nothing_of_the_time_before(file: SeriesFile) -> None:
    for number in range(4 * series.PER_MEAN):
        file.append(BEGIN + 10 * number, row(number))
    back = 2 * series.PER_MEAN + 3
    file.append(BEGIN + 10 * back, row(0))
    assert values(file.read(FINE, BEGIN, BEGIN + 10 * (back + 2))) == [*range(back), 0, None]
    assert values(file.read(COARSE, BEGIN, BEGIN + 1200)) == [14.5, 44.5, None, None]
    file.append(BEGIN + 10 * 3 * series.PER_MEAN, row(0))
    assert values(file.read(COARSE, BEGIN, BEGIN + 1200)) == [14.5, 44.5, (60 + 61 + 62 + 0) / 4, None]


def test_a_clock_that_was_ahead_costs_what_it_wrote_and_no_more(file: SeriesFile) -> None:
    file.append(BEGIN + 400 * 86400, row(9))
    assert file.newest(BEGIN + 5) == pytest.approx(NOTHING, nan_ok=True)
    for number in range(2):
        file.append(BEGIN + 10 * number, row(number))
    assert values(file.read(FINE, BEGIN, BEGIN + 20)) == [0, 1]
    assert file.newest(BEGIN + 15)[0] == 1
