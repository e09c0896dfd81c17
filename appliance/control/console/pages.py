"""Pages that show what is there: the fleet, an instance with its log, GPUs, events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import falcon

from appliance.control.console import charts
from appliance.control.console.rendering import answer, render
from appliance.control.resources import whole
from appliance.core.access import MEETS, Need
from appliance.core.events import Event
from appliance.core.instance import InstanceSpec
from appliance.core.log_lines import readable
from appliance.core.problems import invalid
from appliance.core.views import InstanceView
from appliance.drivers import logs
from appliance.drivers.journal import Journal
from appliance.node import cache_overview, gpus, overview, series
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

LOG_LINES, LONGEST_LOG_LINES = 200, 5000
LONGEST_LOG_BYTES, LONGEST_LINE = 1024 * 1024, 4000  # an open page asks every three seconds
SHOWN_EVENTS = 200
NAVIGATION = (
    ("fleet", "/console", "Fleet", Need.READ),
    ("playground", "/console/playground", "Playground", Need.INFERENCE),
    ("models", "/console/models", "Models", Need.READ),
    ("gpus", "/console/gpus", "GPUs", Need.READ),
    ("events", "/console/events", "Events", Need.READ),
    ("keys", "/console/keys", "Keys", Need.ADMIN),
)


def common(request: falcon.Request, page: str) -> dict[str, Any]:
    """What every page has: who looks at it, and what they may do."""
    principal = request.context.principal
    allowed = frozenset(Need) if principal.role is None else MEETS[principal.role]
    allowed = frozenset[Need]() if principal.refusal else allowed
    return {
        "page": page,
        "token": request.context.token,
        "who": principal.name if principal.role else "",
        "role": principal.role or "",
        "navigation": [(name, path, words) for name, path, words, need in NAVIGATION if need in allowed],
        "may_operate": Need.OPERATE in allowed,
        "may_delete": Need.ADMIN in allowed,
        "may_infer": Need.INFERENCE in allowed,
    }


def first_page(request: falcon.Request) -> str:
    """Of those that this caller may see."""
    return next((path for _, path, _ in common(request, "")["navigation"]), "/console")


class ConsoleResource:
    """What all pages keep."""

    changes = False

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        self.node = node
        self.authenticator = authenticator

    def common(self, request: falcon.Request, page: str) -> dict[str, Any]:
        return common(request, page)


def fleet(node: Node, request: falcon.Request) -> dict[str, Any]:
    shown = overview.show_all(node)
    counts = Counter(each.status for each in shown)
    rates = {each.name: series.newest(node, each.name) for each in shown}
    return {"instances": shown, "counts": counts, "rates": rates, "tag": "", **common(request, "fleet")}


def answer_part(response: falcon.Response, request: falcon.Request, template: str, **values: Any) -> None:
    """A part of a page that is asked for again and again: 204 as long as it would be the same."""
    text = render(template, **values)
    tag = hash_of(text)
    if request.get_param("tag") == tag:
        response.status = falcon.HTTP_204
        return
    response.content_type = falcon.MEDIA_HTML
    response.text = render(template, **{**values, "tag": tag})


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FleetPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        health = overview.health(self.node)
        answer(response, "fleet.html", health=health, open=not self.authenticator.on, **fleet(self.node, request))


class FleetTable(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(response, request, "fleet_table.html", **fleet(self.node, request))


def instance_values(node: Node, request: falcon.Request, name: str) -> dict[str, Any]:
    view = overview.show(node, name)
    events = [each for each in events_of(node) if each["instance"] == name][-12:][::-1]
    return {"instance": view, "spec": asked_for(view), "events": events, "tag": "", **common(request, "fleet")}


def asked_for(view: InstanceView) -> dict[str, Any]:
    """The fields of an instance that are not what they are by default."""
    spec = view.instance.spec
    plain = InstanceSpec(name=spec.name, model_id=spec.model_id)
    fields = spec.mapping()
    return {name: fields[name] for name in fields if name == "model_id" or name in spec.differences(plain)}


def events_of(node: Node) -> Sequence[dict[str, Any]]:
    """All of the journal, the oldest first."""
    return events_at(node.journal, node.journal.mark())


@lru_cache(maxsize=1)
def events_at(journal: Journal[Event], mark: tuple[int, int] | None) -> Sequence[dict[str, Any]]:
    """Read again when it has grown: it has up to 4 MB, and each open page asks every three seconds."""
    return journal.since(0)


class InstancePage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        values = instance_values(self.node, request, name)
        known = cache_overview.known_of(self.node, self.node.state.read().get(name))
        log = log_values(self.node, request, name)
        plots = plot_values(self.node, request, name)
        answer(response, "instance.html", fingerprint=known.digest, why=known.why, **{**values, **log, **plots})


class InstanceState(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        answer_part(response, request, "instance_state.html", **instance_values(self.node, request, name))


def log_values(node: Node, request: falcon.Request, name: str) -> dict[str, Any]:
    """The end of a replica's log; `find`: only lines with this text."""
    replica, find = whole(request, "replica", 0) or 0, request.get_param("find") or ""
    instance = node.state.read().get(name)
    if not 0 <= replica < instance.spec.replicas:
        raise invalid(f"There is no replica {replica}")
    lines = logs.tail(node.log_path(instance, replica), LONGEST_LOG_LINES if find else LOG_LINES, LONGEST_LOG_BYTES)
    found = [line[:LONGEST_LINE] for line in lines if find.lower() in line.lower()][-LOG_LINES:]
    replicas = instance.spec.replicas
    return {
        "lines": readable(found),
        "replica": replica,
        "find": find,
        "replicas": replicas,
    }


SPANS = ((15, "15 min"), (60, "1 h"), (6 * 60, "6 h"), (24 * 60, "1 d"), (7 * 24 * 60, "7 d"))


class InstancePlots(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        answer_part(response, request, "plots.html", name=name, tag="", **plot_values(self.node, request, name))


def plot_values(node: Node, request: falcon.Request, name: str) -> dict[str, Any]:
    minutes = whole(request, "minutes", SPANS[0][0]) or 0
    view = series.show(node, name, minutes)
    return {"charts": charts.charts_of(view), "minutes": minutes, "spans": SPANS, "step_secs": view.step_secs}


class InstanceLog(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        values = log_values(self.node, request, name)
        answer_part(response, request, "log.html", name=name, tag="", **values)


class LogDownload(ConsoleResource):
    """The end of a log, to keep."""

    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        replica = whole(request, "replica", 0) or 0
        window = overview.log_window(self.node, name, replica, -LONGEST_LOG_LINES, None)
        response.content_type = "text/plain; charset=utf-8"
        response.downloadable_as = f"{name}-{replica}.log"
        response.text = "\n".join(window.lines) + "\n"


class GpusPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer(response, "gpus.html", gpus=gpus.show(self.node), **common(request, "gpus"))


def event_values(node: Node, request: falcon.Request) -> dict[str, Any]:
    """The newest first; `find`: only those with this text in their word, instance or message."""
    find = request.get_param("find") or ""
    events = [each for each in events_of(node) if is_found(each, find)]
    return {"events": events[-SHOWN_EVENTS:][::-1], "total": len(events), "find": find, "tag": ""}


def is_found(event: dict[str, Any], find: str) -> bool:
    text = f"{event['event']} {event['instance'] or ''} {event['message']}"
    return find.lower() in text.lower()


class EventsPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer(response, "events.html", **event_values(self.node, request), **common(request, "events"))


class EventsTable(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(response, request, "events_table.html", **event_values(self.node, request))
