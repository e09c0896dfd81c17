"""Vectors as pictures: how alike texts are, and where they lie in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

SHADES = 20
MARGIN, SIDE = 4.0, 100.0  # of the picture of a plane


class Cell(NamedTuple):
    """shade: 0 to SHADES, of the colours in console.css."""

    value: float
    shade: int


class Neighbour(NamedTuple):
    text: int
    value: float


class Point(NamedTuple):
    """0 to SIDE each, with the origin at the top left."""

    x: float
    y: float


def similarities(vectors: Sequence[Sequence[float]]) -> Any:
    """The cosine of each with each: a square of [n, n]."""
    import numpy as np  # only now: few look here, and it takes 10 MB

    rows = np.asarray(vectors, np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    return unit @ unit.T


def heat(matrix: Any) -> list[list[Cell]]:
    """Shades from the least to the most alike of different texts."""
    size = len(matrix)
    others = [float(matrix[row][column]) for row in range(size) for column in range(size) if row != column]
    low, high = min(others), max(others)
    return [[Cell(float(value), shade(float(value), low, high)) for value in row] for row in matrix]


def shade(value: float, low: float, high: float) -> int:
    share = 1.0 if high <= low else (value - low) / (high - low)
    return round(SHADES * min(1.0, max(0.0, share)))


def neighbours(matrix: Any, count: int) -> list[Neighbour]:
    """Of the first text, the most alike first."""
    ranked = sorted(range(1, len(matrix)), key=lambda text: -float(matrix[0][text]))
    return [Neighbour(text, float(matrix[0][text])) for text in ranked[:count]]


def plane(vectors: Sequence[Sequence[float]]) -> list[Point]:
    """The two directions in which the vectors differ most (principal components), fitted into the picture."""
    import numpy as np

    rows = np.asarray(vectors, np.float64)
    centred = rows - rows.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    flat = centred @ directions[:2].T
    if flat.shape[1] < 2:
        flat = np.hstack([flat, np.zeros((len(flat), 2 - flat.shape[1]))])
    spread = np.abs(flat).max() or 1.0
    fitted = SIDE / 2 + flat / spread * (SIDE / 2 - MARGIN)
    return [Point(round(float(x), 2), round(float(y), 2)) for x, y in fitted]
