"""Vectors as pictures: shades and places."""

import math

import pytest

from appliance.control.console import pictures, rendering
from appliance.control.console.pictures import SHADES

VECTORS = [[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 1.0, 0.2], [0.0, 0.9, -0.2]]


def test_the_shades_go_from_the_least_to_the_most_alike() -> None:
    cells = pictures.heat(pictures.similarities(VECTORS))
    assert [round(row[number].value, 6) for number, row in enumerate(cells)] == [1.0] * 4
    others = [cell.shade for row, line in enumerate(cells) for column, cell in enumerate(line) if row != column]
    assert (min(others), max(others)) == (0, SHADES)
    assert cells[0][1].shade > cells[0][2].shade


def test_what_is_all_alike_has_one_shade() -> None:
    cells = pictures.heat(pictures.similarities([[1.0, 0.0]] * 3))
    assert {cell.shade for row in cells for cell in row} == {SHADES}
    assert pictures.similarities([[0.0, 0.0], [1.0, 0.0]])[0][1] == 0.0, "a vector without a length is like nothing"


def test_neighbours_come_in_their_order() -> None:
    found = pictures.neighbours(pictures.similarities(VECTORS), 2)
    assert [each.text for each in found] == [1, 2]


@pytest.mark.parametrize("vectors", [VECTORS, VECTORS[:2], [[1.0]] * 3, [[0.0, 0.0]] * 2])
def test_all_points_lie_in_the_picture(vectors: list[list[float]]) -> None:
    points = pictures.plane(vectors)
    assert len(points) == len(vectors)
    assert all(0 <= each <= pictures.SIDE for point in points for each in point)


def test_what_is_alike_lies_close_together() -> None:
    one, two, three, four = pictures.plane(VECTORS)
    assert math.dist(one, two) < math.dist(one, three)
    assert math.dist(three, four) < math.dist(two, four)


@pytest.mark.parametrize(
    ("secs", "words"), [(None, "-"), (0.46, "0.5 s"), (42, "42 s"), (125, "2 min"), (7300, "2 h"), (180000, "2 d")]
)
def test_durations_as_people_say_them(secs: float | None, words: str) -> None:
    assert rendering.duration(secs) == words


def test_there_is_a_colour_for_each_shade() -> None:
    css = rendering.static_files()["console.css"].content.decode()
    assert all(f".heat-{shade} " in css for shade in range(SHADES + 1))
