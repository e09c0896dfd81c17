"""Series as pictures: lines that break where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from appliance.node.series import SeriesView

WIDTH, HEIGHT = 600.0, 120.0


class PlotLine(NamedTuple):
    """path: as SVG has it."""

    words: str
    path: str


class Chart(NamedTuple):
    """high: what the upper edge stands for; latest: of each line, its last value."""

    title: str
    lines: tuple[PlotLine, ...]
    high: str
    latest: str


class Sketch(NamedTuple):
    """What a chart is made of. columns: name in the series -> words. least_high: the upper edge is no lower, so that
    noise does not look like news."""

    title: str
    columns: Mapping[str, str]
    unit: str = ""
    least_high: float = 0.0


SKETCHES = (
    Sketch("Texts a second", {"texts": "texts", "hits": "of the cache"}),
    Sketch("Calls a second", {"calls": "calls", "errors": "errors"}),
    Sketch("Latency", {"p50_ms": "p50", "p95_ms": "p95"}, " ms"),
    Sketch("Waiting", {"queue": "queue"}),
    Sketch("Memory", {"memory_mib": "memory", "gpu_mib": "on GPUs"}, " MiB"),
    Sketch("Replicas that answer", {"ready": "ready"}),
    # From a thousandth on an answer is wrong.
    Sketch("From the golden answers (1 - cosine)", {"golden_distance": "distance"}, least_high=0.001),
)


def charts_of(view: SeriesView) -> list[Chart]:
    return [chart(sketch, view) for sketch in SKETCHES]


def chart(sketch: Sketch, view: SeriesView) -> Chart:
    columns = {words: view.column(name) for name, words in sketch.columns.items()}
    # What is never measured here, as memory of GPUs where there is none, is not spoken of.
    found = {words: values for words, values in columns.items() if not all(map(math.isnan, values))} or columns
    known = [value for values in found.values() for value in values if not math.isnan(value)]
    high = rounded_up(max(known, default=0.0), sketch.least_high)
    lines = tuple(PlotLine(words, path_of(values, high)) for words, values in found.items())
    latest = ", ".join(f"{words} {in_words(last(values))}{sketch.unit}" for words, values in found.items())
    return Chart(sketch.title, lines, f"{in_words(high)}{sketch.unit}", latest)


def rounded_up(value: float, least: float = 0.0) -> float:
    """The next of 1, 2, 5, 10, 20 …, and at least ``least``."""
    if value <= least:
        return least or 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * 0.999999)


def path_of(values: Sequence[float], high: float) -> str:
    parts, is_drawing = list[str](), False
    step = WIDTH / max(1, len(values) - 1)
    for place, value in enumerate(values):
        if math.isnan(value):
            is_drawing = False
            continue
        x, y = place * step, HEIGHT - min(1.0, value / high) * HEIGHT
        parts.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        if not is_drawing:
            parts.append("h0.1")  # one point alone is seen as well
        is_drawing = True
    return "".join(parts)


def last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if not math.isnan(value)), math.nan)


def in_words(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
