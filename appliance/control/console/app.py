"""The Falcon application of the console."""

from __future__ import annotations

from typing import Any

import falcon
from falcon.routing import CompiledRouter

from appliance.control.console import actions, bench, instance_pages, keys, live, models, pages, playground, rendering
from appliance.control.console.login import LoginResource, LogoutResource
from appliance.control.console.middleware import ConsoleMiddleware
from appliance.control.console.needs import INSTANCE, LOGIN, LOGOUT, MODEL, NEEDS
from appliance.control.console.resource import common
from appliance.control.errors import FRAMEWORK, STATUS, on_surprise
from appliance.control.models import App
from appliance.core.problems import Kind, Problem
from appliance.drivers.httpserver import with_head
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

RESOURCES: dict[str, type] = {
    LOGIN: LoginResource,
    LOGOUT: LogoutResource,
    "/console": pages.FleetPage,
    "/console/fleet": pages.FleetTable,
    "/console/stream": live.PageStream,
    "/console/create": actions.CreatePage,
    "/console/create/check": actions.CreateCheck,
    INSTANCE: instance_pages.InstancePage,
    f"{INSTANCE}/state": instance_pages.InstanceState,
    f"{INSTANCE}/plots": instance_pages.InstancePlots,
    f"{INSTANCE}/log": instance_pages.InstanceLog,
    f"{INSTANCE}/log.txt": instance_pages.LogDownload,
    f"{INSTANCE}/fields": actions.FieldsPage,
    f"{INSTANCE}/fields/check": actions.FieldsCheck,
    f"{INSTANCE}/delete": actions.DeleteInstance,
    f"{INSTANCE}/{{verb}}": actions.InstanceVerb,
    "/console/models": models.ModelsPage,
    "/console/models/table": models.ModelsTable,
    "/console/models/add": models.AddModel,
    f"{MODEL}/delete": models.DeleteModel,
    f"{MODEL}/{{verb}}": models.ModelVerb,
    "/console/gpus": pages.GpusPage,
    "/console/bench": bench.BenchPage,
    "/console/bench/measure": bench.BenchMeasure,
    "/console/bench/result": bench.BenchResult,
    "/console/doctor": pages.DoctorPage,
    "/console/events": pages.EventsPage,
    "/console/events/table": pages.EventsTable,
    "/console/keys": keys.KeysPage,
    "/console/keys/create": keys.CreateKey,
    "/console/keys/revoke": keys.RevokeKey,
    "/console/playground": playground.PlaygroundPage,
    "/console/playground/{task}": playground.PlaygroundTask,
}
assert set(RESOURCES) == set(NEEDS)


class StaticResource:
    """Files that belong to the pages; their address has the tag of their content."""

    def on_get(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        file = rendering.static_files().get(name)
        if file is None:
            raise falcon.HTTPNotFound
        response.content_type = file.content_type
        response.set_header("Cache-Control", "public, max-age=31536000, immutable")
        response.set_header("Vary", "Accept-Encoding")
        if "gzip" in (request.get_header("Accept-Encoding") or ""):
            response.set_header("Content-Encoding", "gzip")
            response.data = file.compressed
        else:
            response.data = file.content


def console_app(node: Node, authenticator: Authenticator) -> App:
    paths = CompiledRouter()
    for path, resource in RESOURCES.items():
        paths.add_route(path, with_head(resource(node, authenticator)))
    paths.add_route("/console/static/{name}", with_head(StaticResource()))
    app = falcon.App(middleware=[ConsoleMiddleware(node, authenticator, paths)], router=paths)
    app.set_error_serializer(serialize)
    app.add_error_handler(Problem, on_problem)
    app.add_error_handler(Exception, on_exception)
    return app


def on_problem(request: falcon.Request, response: falcon.Response, problem: Problem, params: Any) -> None:
    """A page, or the part of one that asked: htmx puts it where notices stand."""
    show_refusal(request, response, STATUS[problem.kind], problem.message, problem.kind is Kind.UNAUTHENTICATED)


def on_exception(request: falcon.Request, response: falcon.Response, error: Exception, params: Any) -> None:
    on_surprise(request, response, error, params)
    show_refusal(request, response, 500, "Something went wrong inside; the log of control has it", False)


def serialize(request: falcon.Request, response: falcon.Response, error: falcon.HTTPError) -> None:
    words = error.description or FRAMEWORK.get(error.status_code, ("", error.title))[1]
    show_refusal(request, response, error.status_code, words, False)


def show_refusal(
    request: falcon.Request, response: falcon.Response, status: int, message: str, ask_for_key: bool
) -> None:
    if request.get_header("HX-Request"):
        if ask_for_key:
            response.set_header("HX-Redirect", LOGIN)
        response.set_header("HX-Retarget", "#notice")
        response.set_header("HX-Reswap", "innerHTML")
        rendering.answer(response, "refusal.html", status=status, message=message)
        return
    values = {"message": message, "status": status, **common(request, "")}
    rendering.answer(response, "problem.html", **values)
