"""Every error of the REST API as one JSON shape: {"error", "code", "timestamp"}."""

from __future__ import annotations

import json
import logging
from typing import Any

import falcon

from appliance.core.problems import Kind, Problem, nearest, quoted
from appliance.node.context import now

App = falcon.App[falcon.Request, falcon.Response]
log = logging.getLogger(__name__)

STATUS = {
    Kind.INVALID: 422,
    Kind.NOT_FOUND: 404,
    Kind.CONFLICT: 409,
    Kind.EXHAUSTED: 507,
    Kind.UNAVAILABLE: 503,
    Kind.TIMEOUT: 504,
    Kind.PRECONDITION: 409,
    Kind.FORBIDDEN: 403,
    Kind.UNAUTHENTICATED: 401,
    Kind.INTERNAL: 500,
}
# What Falcon itself refuses, in our codes and words.
FRAMEWORK = {
    400: ("BAD_REQUEST", "The request cannot be read"),
    404: ("NOT_FOUND", "There is no such path; see /openapi.json or the README for the routes"),
    405: ("METHOD_NOT_ALLOWED", "This path does not take that method; the Allow header lists those it takes"),
    413: ("PAYLOAD_TOO_LARGE", "The body is too large"),
    415: ("UNSUPPORTED_MEDIA_TYPE", "Send the body as Content-Type: application/json"),
}


def install(app: App) -> None:
    app.set_error_serializer(serialize)
    app.add_error_handler(Problem, on_problem)
    app.add_error_handler(Exception, on_surprise)


def body(message: str, code: str) -> str:
    return json.dumps({"error": message, "code": code, "timestamp": now()})


def on_problem(request: falcon.Request, response: falcon.Response, problem: Problem, params: Any) -> None:
    response.status = STATUS[problem.kind]
    response.content_type = falcon.MEDIA_JSON
    response.text = body(problem.message, problem.code)


def on_surprise(request: falcon.Request, response: falcon.Response, error: Exception, params: Any) -> None:
    if isinstance(error, falcon.HTTPError):
        raise error
    log.exception("%s %s failed", request.method, request.path)
    response.status = 500
    response.content_type = falcon.MEDIA_JSON
    message = f"Internal error: {type(error).__name__}. The log of control has the details"
    response.text = body(message, "INTERNAL_ERROR")


def serialize(request: falcon.Request, response: falcon.Response, error: falcon.HTTPError) -> None:
    code, words = FRAMEWORK.get(error.status_code, (error.title.upper().replace(" ", "_"), error.title))
    response.content_type = falcon.MEDIA_JSON
    response.text = body(error.description or words, code)


def refusal(status: int, message: str) -> tuple[str, str]:
    """For what is no HTTP request at all: (content type, body)."""
    code = {403: "FORBIDDEN", 414: "URI_TOO_LONG", 431: "HEADERS_TOO_LARGE", 501: "NOT_IMPLEMENTED"}.get(
        status, "BAD_REQUEST"
    )
    return falcon.MEDIA_JSON, body(message, code)


def known_parameters(request: falcon.Request, *names: str) -> None:
    """Raises: Problem for a query parameter that the route does not have."""
    for name in request.params:
        if name not in names:
            raise Problem(
                Kind.INVALID, "VALIDATION_ERROR", f"Unknown query parameter {quoted(name)}{nearest(name, names)}"
            )
