"""The Falcon application: the table of `routes`, and errors in the dialect of the path that was asked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import falcon
from falcon.routing import CompiledRouter

from appliance.core import access
from appliance.core.access import Need
from appliance.core.problems import Kind, Problem
from appliance.drivers.memory import Reserve
from appliance.drivers.metrics import Meters
from appliance.gateway import routes
from appliance.gateway.bodies import RequestMemory
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Gateway
from appliance.gateway.tei_info import explain_unavailable
from appliance.node.authentication import Authenticator

log = logging.getLogger(__name__)

INSTANCES = "/instances/"
EXPOSED = (
    "X-TEI-Instance",
    "Server-Timing",
    "Retry-After",
    "Retry-After-Ms",
    "X-Compute-Tokens",
    "X-TEI-Cache",
    "X-TEI-Fingerprint",
)  # to pages (CORS)
CROWDED = 32  # requests at work in a process: what comes now waits for no model, and leaves the threads to others
FRAMEWORK = {
    400: Reason.MALFORMED,
    404: Reason.NO_PATH,
    405: Reason.METHOD,
    413: Reason.LARGE,
    415: Reason.MEDIA,
}


def create_app(gateway: Gateway, origins: Sequence[str] = ()) -> falcon.App[falcon.Request, falcon.Response]:
    """origins: whose pages may call from a browser (`cors_allow_origins`)."""
    paths = routes.router(gateway)
    middleware: list[Any] = [
        PrefixMiddleware(gateway.meters, gateway.reserve),
        AuthenticationMiddleware(gateway.authenticator, paths, preflights_of=origins),
    ]
    if origins:
        every = "*" in origins
        middleware.insert(0, falcon.CORSMiddleware(allow_origins="*" if every else origins, expose_headers=EXPOSED))
        middleware.insert(0, VaryMiddleware())
    app = falcon.App(middleware=middleware, router=paths)

    def refuse(request: falcon.Request, response: falcon.Response, refusal: Refusal, params: Any) -> None:
        selection = request.context.selection
        if refusal.reason is Reason.UNAVAILABLE and selection is not None:
            refusal = explain_unavailable(refusal, gateway.node, selection)
        status, kind, body = routes.dialect_of(paths, request.path).render(refusal)
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


def refusal(status: int, message: str) -> tuple[str, str]:
    """For what is no HTTP request at all: (content type, body)."""
    return "text/plain; charset=utf-8", message


def is_preflight(request: falcon.Request, origins: Sequence[str]) -> bool:
    """Whether a browser asks for a page of one of these origins."""
    allowed = request.get_header("Origin") in origins or "*" in origins
    asks = bool(request.get_header("Origin") and request.get_header("Access-Control-Request-Method"))
    return request.method == "OPTIONS" and asks and allowed


class VaryMiddleware:
    """A cache may not give one origin's answer to another."""

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        response.append_header("Vary", "Origin")


class AuthenticationMiddleware:
    """Who comes in. Falcon middleware, after the prefix is off the path. ``paths``: the router of the application."""

    def __init__(self, authenticator: Authenticator, paths: CompiledRouter, preflights_of: Sequence[str]) -> None:
        self.authenticator = authenticator
        self.paths = paths
        self.preflights_of = preflights_of

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        if is_preflight(request, self.preflights_of):
            return  # a browser asks without a key whether it may ask
        need = routes.need_of(self.paths, request.method, request.path)
        # Asked of an instance, /health tells which ones there are, and why one has failed.
        if request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model"):
            need = access.effective(need, open_health=False)
        is_open = access.effective(need, self.authenticator.settings.open_health) is Need.OPEN
        try:
            if self.is_public(request):
                self.authenticator.refuse_certificate(request.env)
                request.context.stranger, request.context.principal = True, ""
                return
            principal = self.authenticator.identify(request.env)
            self.authenticator.authorize(principal, need)
        except Problem as problem:
            forbidden = problem.kind is Kind.FORBIDDEN
            raise Refusal(Reason.FORBIDDEN if forbidden else Reason.UNAUTHENTICATED, problem.message) from None
        request.context.stranger = is_open and principal.refusal is not None
        request.context.principal = principal.name

    def is_public(self, request: falcon.Request) -> bool:
        is_read = request.method in ("GET", "HEAD") and request.context.instance is None
        return is_read and routes.is_public(self.paths, request.path)


class PrefixMiddleware:
    """`/instances/NAME/...` is the rest of the path, asked of that instance. Counts every request."""

    def __init__(self, meters: Meters, reserve: Reserve) -> None:
        self.meters = meters
        self.reserve = reserve
        self.at_work = 0  # requests
        self.lock = threading.Lock()

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        with self.lock:
            self.at_work += 1
            request.context.crowded = self.at_work > CROWDED
        request.context.began = time.monotonic()
        request.context.instance = None
        request.context.selection = None
        request.context.memory = RequestMemory(self.reserve)
        if request.path.startswith(INSTANCES):
            name, _, rest = request.path.removeprefix(INSTANCES).partition("/")
            request.context.instance = name
            request.path = f"/{rest}"

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        with self.lock:
            self.at_work -= 1
        request.context.memory.release()
        route = request.uri_template or "none"  # of ours: clients cannot make labels
        self.meters.http.labels(route, str(response.status_code)).inc()
        self.meters.http_durations.labels(route).observe(time.monotonic() - request.context.began)
