"""The Falcon application: routes of CONTRACT section 6, and errors in the dialect of the path that was asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import falcon

from appliance.core import access
from appliance.core.access import Need
from appliance.core.problems import Kind, Problem
from appliance.drivers.memory import Reserve
from appliance.drivers.metrics import Meters
from appliance.gateway import cohere, docs, info, openai, tei
from appliance.gateway.bodies import Place
from appliance.gateway.info import explained
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Gateway
from appliance.node.authentication import Authenticator

log = logging.getLogger(__name__)

Render = Callable[[Refusal], tuple[int, str, bytes]]
INSTANCES = "/instances/"
FRAMEWORK = {
    400: Reason.MALFORMED,
    404: Reason.NO_PATH,
    405: Reason.METHOD,
    413: Reason.LARGE,
    415: Reason.MEDIA,
}


def create_app(gateway: Gateway) -> falcon.App[falcon.Request, falcon.Response]:
    middleware: list[Any] = [Prefix(gateway.meters, gateway.reserve), AuthenticationMiddleware(gateway.authenticator)]
    app = falcon.App(middleware=middleware)
    routes = {
        "/v1/embeddings": openai.Embeddings(gateway),
        "/embeddings": openai.Embeddings(gateway),
        "/v1/models": openai.Models(gateway),
        "/v1/models/{model:path}": openai.Model(gateway),
        "/v1/rerank": cohere.Rerank(gateway, "1"),
        "/v2/rerank": cohere.Rerank(gateway, "2"),
        "/": tei.AnyTask(gateway),
        "/embed": tei.Embed(gateway),
        "/embed_sparse": tei.EmbedSparse(gateway),
        "/embed_all": tei.EmbedAll(gateway),
        "/rerank": tei.Rerank(gateway),
        "/predict": tei.Predict(gateway),
        "/similarity": tei.Similarity(gateway),
        "/tokenize": tei.Tokenize(gateway),
        "/decode": tei.Decode(gateway),
        "/info": info.Info(gateway),
        "/health": info.Health(gateway),
        "/openapi.json": docs.Description(),
        "/docs": docs.Page(),
    }
    for path, resource in routes.items():
        app.add_route(path, resource)

    def refuse(request: falcon.Request, response: falcon.Response, refusal: Refusal, params: Any) -> None:
        choice = request.context.choice
        if refusal.reason is Reason.UNAVAILABLE and choice is not None:
            refusal = explained(refusal, gateway.node, choice)
        status, kind, body = render_of(request.path)(refusal)
        response.status, response.content_type, response.data = status, kind, body
        for name, value in refusal.headers.items():
            response.set_header(name, value)

    def refuse_framework(
        request: falcon.Request, response: falcon.Response, error: falcon.HTTPError, params: Any
    ) -> None:
        for name, value in dict(error.headers or {}).items():  # Allow
            response.set_header(name, value)
        words = {404: f"There is no {request.path} here: see /docs", 405: "This path does not take that method"}
        message = words.get(error.status_code, error.description or error.title)
        refuse(request, response, Refusal(FRAMEWORK.get(error.status_code, Reason.MALFORMED), message), params)

    def surprise(request: falcon.Request, response: falcon.Response, error: Exception, params: Any) -> None:
        log.exception("%s %s failed", request.method, request.path)
        message = f"Internal error: {type(error).__name__}. The log of gateway has the details"
        refuse(request, response, Refusal(Reason.INTERNAL, message), params)

    app.add_error_handler(Exception, surprise)
    app.add_error_handler(falcon.HTTPError, refuse_framework)
    app.add_error_handler(Refusal, refuse)
    return app


def render_of(path: str) -> Render:
    """Errors speak the dialect of the route."""
    if path.endswith(("/v1/rerank", "/v2/rerank")):
        return cohere.render
    if path.startswith("/v1/") or path == "/embeddings":
        return openai.render
    return tei.render


def refusal(status: int, message: str) -> tuple[str, str]:
    """For what is no HTTP request at all: (content type, body)."""
    return "text/plain; charset=utf-8", message


class AuthenticationMiddleware:
    """Who comes in. Falcon middleware, after the prefix is off the path."""

    def __init__(self, authenticator: Authenticator) -> None:
        self.authenticator = authenticator

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        # Asked of an instance, /health tells which ones there are, and why one has failed.
        named = request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model")
        open_health = self.authenticator.settings.open_health and not named
        need = access.gateway_need(request.method, request.path, open_health)
        try:
            self.authenticator.http(need, request.env)
            request.context.stranger = need is Need.OPEN and not self.authenticator.knows(request.env)
        except Problem as problem:
            forbidden = problem.kind is Kind.FORBIDDEN
            raise Refusal(Reason.FORBIDDEN if forbidden else Reason.UNAUTHENTICATED, problem.message) from None


class Prefix:
    """`/instances/NAME/...` is the rest of the path, asked of that instance. Counts every request."""

    def __init__(self, meters: Meters, reserve: Reserve) -> None:
        self.meters = meters
        self.reserve = reserve

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        request.context.began = time.monotonic()
        request.context.instance = None
        request.context.choice = None
        request.context.place = Place(self.reserve)
        if request.path.startswith(INSTANCES):
            name, _, rest = request.path.removeprefix(INSTANCES).partition("/")
            request.context.instance = name
            request.path = f"/{rest}"

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        request.context.place.release()
        route = request.uri_template or "none"  # of ours: clients cannot make labels
        self.meters.http.labels(route, str(response.status_code)).inc()
        self.meters.http_durations.labels(route).observe(time.monotonic() - request.context.began)
