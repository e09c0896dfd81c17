"""The page of an instance: its state, what it did in the course of time, and its log."""

from __future__ import annotations

from typing import Any

import falcon
from markupsafe import Markup

from appliance.control.console import charts
from appliance.control.console.live import answer_part, part
from appliance.control.console.pages import events_of
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource, common
from appliance.control.resources import whole
from appliance.core.instance import InstanceSpec
from appliance.core.log_lines import readable
from appliance.core.problems import invalid
from appliance.core.state import Instance
from appliance.core.views import InstanceView
from appliance.drivers import logs
from appliance.node import cache_overview, overview, series
from appliance.node.context import Node

LOG_LINES, LONGEST_LOG_LINES = 200, 5000
LONGEST_DOWNLOAD = 16 * 1024 * 1024  # bytes: more than a log has before it is rotated
LONGEST_LOG_BYTES, LONGEST_LINE = 1024 * 1024, 4000  # a page that is open asks each second while the log grows
SHOWN_EVENTS = 12
SPANS = ((15, "15 min"), (60, "1 h"), (6 * 60, "6 h"), (24 * 60, "1 d"), (7 * 24 * 60, "7 d"))


def state(node: Node, request: falcon.Request, name: str) -> Markup:
    view = overview.show(node, name)
    events = [each for each in events_of(node) if each["instance"] == name][-SHOWN_EVENTS:][::-1]
    return part("instance_state.html", instance=view, spec=asked_for(view), events=events, **common(request, ""))


def asked_for(view: InstanceView) -> dict[str, Any]:
    """The fields of an instance that are not what they are by default."""
    spec = view.instance.spec
    plain = InstanceSpec(name=spec.name, model_id=spec.model_id)
    fields = spec.mapping()
    return {name: fields[name] for name in fields if name == "model_id" or name in spec.differences(plain)}


def log(node: Node, request: falcon.Request, name: str) -> Markup:
    """The end of a replica's log; `find`: only lines with this text."""
    replica, find = whole(request, "replica", 0) or 0, request.get_param("find") or ""
    instance = node.state.read().get(name)
    replicas = instance.spec.replicas
    refuse_no_replica(instance, replica)
    lines = logs.tail(node.log_path(instance, replica), LONGEST_LOG_LINES if find else LOG_LINES, LONGEST_LOG_BYTES)
    found = readable([line[:LONGEST_LINE] for line in lines if find.lower() in line.lower()][-LOG_LINES:])
    return part("log.html", name=name, lines=found, replica=replica, find=find, replicas=replicas)


def refuse_no_replica(instance: Instance, replica: int) -> None:
    if not 0 <= replica < instance.spec.replicas:
        raise invalid(f"There is no replica {replica}")


def plots(node: Node, request: falcon.Request, name: str) -> Markup:
    minutes = whole(request, "minutes", SPANS[0][0]) or 0
    view = series.show(node, name, minutes)
    values = {"step_secs": view.step_secs, "source": view.source, "why": view.why}
    return part("plots.html", name=name, charts=charts.charts_of(view), minutes=minutes, spans=SPANS, **values)


class InstancePage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        known = cache_overview.known_of(self.node, self.node.state.read().get(name))
        parts: dict[str, Any] = {each.__name__: each(self.node, request, name) for each in (state, plots, log)}
        values = {"fingerprint": known.digest, "why": known.why, **self.common(request, "fleet")}
        answer(response, "instance.html", name=name, **parts, **values)


class InstanceState(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        answer_part(request, response, state(self.node, request, name))


class InstancePlots(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        answer_part(request, response, plots(self.node, request, name))


class InstanceLog(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        answer_part(request, response, log(self.node, request, name))


class LogDownload(ConsoleResource):
    """The end of a log, to keep."""

    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        replica, instance = whole(request, "replica", 0) or 0, self.node.state.read().get(name)
        refuse_no_replica(instance, replica)
        lines = logs.tail(self.node.log_path(instance, replica), LONGEST_LOG_LINES, LONGEST_DOWNLOAD)
        response.content_type = "text/plain; charset=utf-8"
        response.downloadable_as = f"{name}-{replica}.log"
        response.data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
