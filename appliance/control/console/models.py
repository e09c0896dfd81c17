"""Models: what is here, what is on its way, and what may be done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon
from markupsafe import Markup

from appliance.control.console.actions import go_to
from appliance.control.console.live import answer_part, part
from appliance.control.console.middleware import form
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource, common
from appliance.core.problems import invalid
from appliance.node import model_overview
from appliance.node.context import Node
from appliance.operations import models

VERBS: dict[str, Callable[[Node, str], Any]] = {
    "download": models.download,
    "load": lambda node, model_id: models.load(node, model_id, None),
    "cancel": models.cancel,
}


def asked_model(request: falcon.Request) -> str:
    """Ids have slashes, so they come in the form. Raises: Problem."""
    model_id = form(request).get("model_id", "").strip()
    if not model_id:
        raise invalid("Say which model: its hub id, or the path of a folder")
    return model_id


def table(node: Node, request: falcon.Request) -> Markup:
    return part("models_table.html", models=model_overview.show_all(node), **common(request, "models"))


class ModelsPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer(response, "models.html", table=table(self.node, request), **self.common(request, "models"))


class ModelsTable(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        answer_part(request, response, table(self.node, request))


class AddModel(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        models.add(self.node, {"model_id": asked_model(request)})
        go_to(response, "/console/models")


class ModelVerb(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response, verb: str) -> None:
        if verb not in VERBS:
            raise falcon.HTTPNotFound(description=f"There is no verb {verb}")
        model_id = asked_model(request)
        VERBS[verb](self.node, model_id)
        status = model_overview.show(self.node, model_id).status
        answer(response, "done.html", message=f"{verb}: {model_id} is {status}")


class DeleteModel(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        models.remove(self.node, asked_model(request), keep_files=False)
        go_to(response, "/console/models")
