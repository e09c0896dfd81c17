"""How fast an instance is: throughput against latency, with more and more requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import falcon
from markupsafe import Markup

from appliance.control.console.charts import in_words, rounded_up
from appliance.control.console.live import answer_part, part
from appliance.control.console.middleware import form
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource
from appliance.core.benchmark import LEVELS, LoadStep, saturation
from appliance.node import benchmarks as measured
from appliance.node import overview
from appliance.node.benchmarks import Benchmark
from appliance.node.context import Node
from appliance.operations import benchmarks

WIDTH, HEIGHT = 600.0, 240.0


class CurvePoint(NamedTuple):
    """In the picture: x of the throughput, y of the latency."""

    x: float
    y: float
    step: LoadStep


class Curve(NamedTuple):
    """path: through all points, as SVG has it. most_texts, most_ms: what the right and the upper edge stand for."""

    points: tuple[CurvePoint, ...]
    path: str
    most_texts: str
    most_ms: str


def curve(steps: Sequence[LoadStep]) -> Curve | None:
    """None before there is a point."""
    answered = [step for step in steps if step.texts_per_sec]
    if not answered:
        return None
    texts = rounded_up(max(step.texts_per_sec for step in answered))
    latency = rounded_up(max(step.p95_ms for step in answered))
    points = tuple(
        CurvePoint(
            round(step.texts_per_sec / texts * WIDTH, 1), round(HEIGHT - step.p95_ms / latency * HEIGHT, 1), step
        )
        for step in answered
    )
    path = "M" + "L".join(f"{point.x} {point.y}" for point in points)
    return Curve(points, path, in_words(texts), in_words(latency))


def result(node: Node, name: str) -> Markup:
    found: Benchmark | None = measured.find(node, node.state.read().get(name))
    steps = found.steps if found else ()
    best = saturation(steps) if found and found.status == measured.DONE else None
    return part("bench_result.html", name=name, found=found, curve=curve(steps), best=best, levels=len(LEVELS))


class BenchPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        running = [each for each in overview.show_all(self.node) if each.replicas_ready]
        asked = request.get_param("instance") or (running[0].name if running else "")
        shown = result(self.node, asked) if asked else ""
        values = {"secs": benchmarks.STEP_SECS * len(LEVELS), **self.common(request, "bench")}
        answer(response, "bench.html", instances=running, asked=asked, result=shown, **values)


class BenchMeasure(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        sent = form(request)
        begun = benchmarks.start(self.node, sent.get("instance", ""), force="force" in sent)
        response.content_type = falcon.MEDIA_HTML
        response.text = str(result(self.node, begun.instance))


class BenchResult(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(request, response, result(self.node, request.get_param("instance") or ""))
