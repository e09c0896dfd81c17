"""What the pages let one do with instances: the verbs of the REST API, with the same words when they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon

from appliance.control.console.forms import body_of, form_fields
from appliance.control.console.middleware import form
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource
from appliance.core.problems import Problem
from appliance.core.views import InstanceView
from appliance.node import gpus, model_overview
from appliance.node import room as rooms
from appliance.node.context import Node
from appliance.operations import instances, replacement, restarts, sleep

VERBS: dict[str, Callable[[Node, str], InstanceView]] = {
    "start": instances.start,
    "stop": instances.stop,
    "restart": restarts.restart,
    "sleep": sleep.sleep,
    "wake": sleep.wake,
    "undo": replacement.undo,
}


def go_to(response: falcon.Response, path: str) -> None:
    """Where the page goes when it has been done."""
    response.status = falcon.HTTP_204
    response.set_header("HX-Redirect", path)


class CreatePage(ConsoleResource):
    changes = True

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        models = [each.model_id for each in model_overview.show_all(self.node)]
        values: dict[str, Any] = {"fields": form_fields({}), "models": models, "gpus": gpus.show(self.node)}
        answer(response, "create.html", **values, **self.common(request, "fleet"))

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        created = instances.create(self.node, body_of(form(request)))
        go_to(response, f"/console/instances/{created.name}")


class CreateCheck(ConsoleResource):
    """What would be, while the form is filled in."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = body_of(form(request))
        view, problem = tried(lambda: instances.create(self.node, body, dry_run=True))
        is_begun = bool(body.get("name") and body.get("model_id"))
        values = {"problem": problem if is_begun else "", "changed": None, **placement(self.node, view)}
        answer(response, "check.html", view=view, **values)


def placement(node: Node, view: InstanceView | None) -> dict[str, Any]:
    """What an instance would take, as far as that was measured, and what the GPUs have."""
    needs = rooms.needs_of(node, view.instance) if view else {}
    devices = [gpu.device for gpu in gpus.show(node) if gpu.device.memory_total] if view else []
    return {"needs": needs, "gpus": [(device, needs.get(rooms.place_of(device), 0)) for device in devices]}


class FieldsPage(ConsoleResource):
    changes = True

    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        spec = self.node.state.read().get(name).spec
        fields = [each for each in form_fields(spec.mapping()) if each.name != "name"]
        models = [each.model_id for each in model_overview.show_all(self.node)]
        answer(response, "fields.html", name=name, fields=fields, models=models, **self.common(request, "fleet"))

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        self.set_fields(request, name, dry_run=False)
        go_to(response, f"/console/instances/{name}")

    def set_fields(self, request: falcon.Request, name: str, dry_run: bool) -> InstanceView:
        sent = form(request)
        body = body_of(sent, empty_is_default=True)
        allowed, strategy = "allow_incompatible" in sent, sent.get("strategy") or None
        return replacement.set_fields(self.node, name, body, False, dry_run, allowed, strategy)


class FieldsCheck(FieldsPage):
    """What would change, and how, while the form is filled in."""

    changes = False

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        before = self.node.state.read().get(name).spec
        view, problem = tried(lambda: self.set_fields(request, name, dry_run=True))
        changed = sorted(view.instance.spec.differences(before)) if view else None
        answer(response, "check.html", view=view, problem=problem, changed=changed, needs={}, gpus=[])


def tried(verb: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or why it is refused."""
    try:
        return verb(), ""
    except Problem as problem:
        return None, problem.message


class InstanceVerb(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str, verb: str) -> None:
        if verb not in VERBS:
            raise falcon.HTTPNotFound(description=f"There is no verb {verb}")
        view = VERBS[verb](self.node, name)
        answer(response, "done.html", message=f"{verb}: {name} is {view.status}")


class DeleteInstance(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        instances.delete(self.node, name)
        go_to(response, "/console")
