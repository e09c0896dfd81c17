"""Pages that show what is there: the fleet, GPUs, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import falcon
from markupsafe import Markup

from appliance.control.console.live import SharedPart, answer_part, part
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource, common
from appliance.control.resources import EXAMINED
from appliance.drivers.journal import recent
from appliance.node import gpus, overview, series
from appliance.node.context import Node
from appliance.node.doctor import VERDICTS

SHOWN_EVENTS = 200
FLEET = SharedPart()


def fleet(node: Node, request: falcon.Request) -> Markup:
    """The table of all instances. It takes 60 ms of CPU where there are a hundred."""
    seen = common(request, "fleet")
    may = {name: seen[name] for name in ("may_operate", "may_delete")}

    def make() -> Markup:
        shown = overview.show_all(node)
        counts = Counter(each.status for each in shown)
        rates = {each.name: series.newest(node, each.name) for each in shown}
        return part("fleet_table.html", instances=shown, counts=counts, rates=rates, **may)

    return FLEET.get(node, tuple(may.values()), make)


class FleetPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        values: dict[str, Any] = {"health": overview.health(self.node), "open": not self.authenticator.on}
        answer(response, "fleet.html", table=fleet(self.node, request), **values, **self.common(request, "fleet"))


class FleetTable(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(request, response, fleet(self.node, request))


def events_of(node: Node) -> Sequence[dict[str, Any]]:
    """All of the journal, the oldest first."""
    return recent(node.journal, node.journal.mark())


class GpusPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer(response, "gpus.html", gpus=gpus.show(self.node), **self.common(request, "gpus"))


class DoctorPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        findings = sorted(EXAMINED.recent(self.node), key=lambda each: -VERDICTS.index(each.verdict))
        counts = Counter(each.verdict for each in findings)
        values = {"wrong": counts["wrong"], "warnings": counts["warning"], **self.common(request, "doctor")}
        answer(response, "doctor.html", findings=findings, **values)


def event_values(node: Node, request: falcon.Request) -> dict[str, Any]:
    """The newest first; `find`: only those with this text in their word, instance or message."""
    find = request.get_param("find") or ""
    events = [each for each in events_of(node) if is_found(each, find)]
    return {"events": events[-SHOWN_EVENTS:][::-1], "total": len(events), "find": find}


def is_found(event: dict[str, Any], find: str) -> bool:
    text = f"{event['event']} {event['instance'] or ''} {event['message']}"
    return find.lower() in text.lower()


class EventsPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        values = event_values(self.node, request)
        table = part("events_table.html", **values)
        answer(response, "events.html", table=table, find=values["find"], **self.common(request, "events"))


class EventsTable(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(request, response, part("events_table.html", **event_values(self.node, request)))
