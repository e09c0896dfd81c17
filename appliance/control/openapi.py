"""The management API described as OpenAPI 3.1: what `/openapi.json` shows, and what the tests hold it to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import falcon

from appliance import __version__
from appliance.control.resources import reply
from appliance.control.schema_parts import BINARY, STRING, ref
from appliance.control.schemas import SCHEMAS
from appliance.core import access
from appliance.core.access import ROLES
from appliance.core.fields import Schema

JSON, PLAIN, OCTETS = "application/json", "text/plain", "application/octet-stream"
EVENT_STREAM = "text/event-stream"
WORDS = {
    400: "the request cannot be read",
    401: "a key or certificate is needed",
    403: "this key or certificate may not do that",
    404: "there is none of that name",
    409: "it is in a state that does not allow this",
    413: "the body is too large",
    415: "the body is no JSON",
    422: "a field is wrong; the message names it",
    500: "it failed, with the reason",
    503: "supervisor does not answer, or no copy of the state can be used",
    507: "the change could not be made durable; nothing changed",
}
PATH_PARAMETERS = {
    "name": STRING,
    "model_id": STRING | {"description": "one segment: its slash is written %2F"},
}


class RestOperation(NamedTuple):
    """One method of a route in words. replies: by status. body: the schema of a JSON body."""

    summary: str
    replies: Mapping[int, Schema]
    refusals: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    body: str | None = None
    body_type: str = JSON
    body_required: bool = True
    media_type: str = JSON  # of the replies


def query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": about}


def header(name: str, schema: Schema, about: str) -> Schema:
    return query(name, schema, about) | {"in": "header"}


def described(path: str, method: str, operation: RestOperation) -> Schema:
    replies = {str(code): reply_of(operation.media_type, schema, code) for code, schema in operation.replies.items()}
    refusals = {str(code): reply_of(JSON, ref("Error"), code) for code in sorted({401, 403, *operation.refusals})}
    description: Schema = {
        "operationId": f"{method} {path}",
        "summary": operation.summary,
        "parameters": [*path_parameters(path), *operation.parameters],
        "responses": replies | refusals,
    }
    if operation.body or operation.body_type != JSON:
        content = {operation.body_type: {"schema": ref(operation.body) if operation.body else BINARY}}
        description["requestBody"] = {"required": operation.body_required, "content": content}
    return description


def path_parameters(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in PATH_PARAMETERS.items()
        if f"{{{name}}}" in path
    ]


def reply_of(media_type: str, schema: Schema, code: int) -> Schema:
    return {"description": WORDS.get(code, "done"), "content": {media_type: {"schema": schema}}}


def document(paths: Mapping[str, Mapping[str, RestOperation]]) -> Schema:
    """paths: the operations of each path, by method."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "tei-appliance: management", "version": __version__},
        "paths": {
            path: {method.lower(): described(path, method.lower(), operation) for method, operation in methods.items()}
            for path, methods in paths.items()
        },
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": access.SCHEMES | {"key": access.SCHEMES["key"] | {"description": f"Roles: {ROLES}"}},
        },
        "security": [{}, *({name: []} for name in access.SCHEMES)],
    }


class RestDescriptionResource:
    def __init__(self, document: Schema) -> None:
        self.document = document

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, self.document)
