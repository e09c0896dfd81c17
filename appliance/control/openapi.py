"""The management API described as OpenAPI 3.1: what `/openapi.json` shows, and what the tests hold it to."""

from __future__ import annotations

from typing import Any

import falcon

from appliance import __version__
from appliance.control.resources import reply
from appliance.core import access
from appliance.core.access import ROLES

Schema = dict[str, Any]
JSON = "application/json"


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def thing(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BINARY: Schema = {"type": "string", "format": "binary"}
NUMBER: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
PORT = whole(1024, 65535)
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
GPU: Schema = {"anyOf": [whole(0, 2**31 - 1), {"type": "string", "pattern": "^GPU-[0-9A-Za-z-]{1,100}$"}]}
STATUS: Schema = {"enum": ["starting", "running", "unhealthy", "stopping", "stopped", "failed"]}
MODEL_STATUS: Schema = {"enum": ["available", "downloading", "downloaded", "loading", "verified", "failed"]}
NAME: Schema = {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_-]{0,63}$"}
KEY_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$"}
ROLE: Schema = {"enum": list(ROLES)}
LISTENERS = thing(
    ("bind", "api_port", "grpc_port", "http_port"), bind=STRING, api_port=PORT, grpc_port=PORT, http_port=PORT
)
MODEL_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 512, "pattern": PRINTABLE}

FIELDS: dict[str, Schema] = {
    "name": NAME | {"description": "not control, multiplexer, gateway or monitor"},
    "model_id": MODEL_ID | {"description": "hub id or local folder"},
    "revision": maybe({"type": "string", "minLength": 1, "maxLength": 256, "pattern": PRINTABLE}),
    "port": maybe(PORT | {"description": "of the first replica; the others follow"}),
    "gpu_id": maybe(GPU),
    "gpu_ids": {"anyOf": [array(GPU, maxItems=64), {"const": "auto"}, {"type": "null"}]},
    "replicas": maybe(whole(1, 64, default=1)),
    "max_batch_tokens": maybe(whole(1, 2**31 - 1, default=16384)),
    "max_concurrent_requests": maybe(whole(1, 1_000_000, default=512)),
    "pooling": {"enum": ["cls", "mean", "splade", "last-token", None]},
    "dtype": {"enum": ["float16", "float32", "bfloat16", None]},
    "prometheus_port": maybe(PORT),
    "startup_timeout_secs": maybe(whole(1, 86400)),
    "engine": {"enum": ["tei", "embedded", None]},
    "extra_args": maybe(array({"type": "string", "maxLength": 4096, "pattern": PRINTABLE}, maxItems=256)),
    "token_ids": {
        "enum": ["accept", "refuse", None],
        "default": "accept",
        "description": "whether HTTP takes token ids in the place of texts",
    },
}
REPLICA = thing(
    ("index", "port", "prometheus_port", "gpu_id", "pid", "status", "exit_status", "uptime_secs"),
    index=COUNT,
    port=PORT,
    prometheus_port=PORT,
    gpu_id=maybe(GPU),
    pid=maybe(COUNT),
    status=STATUS,
    exit_status=maybe({"type": "integer"}),
    uptime_secs=maybe(NUMBER),
)
SHOWN: dict[str, Schema] = {
    "status": STATUS,
    "pid": maybe(COUNT),
    "created_at": TIME,
    "uptime_secs": maybe(NUMBER),
    "restarts": COUNT,
    "health_check_failures": COUNT,
    "last_health_check": maybe(TIME),
    "last_error": maybe(STRING),
    "replicas_ready": COUNT,
    "replica_list": array(REPLICA),
}
MODEL: dict[str, Schema] = {
    "model_id": STRING,
    "revision": maybe(STRING),
    "commit": maybe(STRING),
    "source": {"enum": ["hub", "folder", "package", None]},
    "status": MODEL_STATUS,
    "downloaded": FLAG,
    "cache_path": maybe(STRING),
    "cache_size_bytes": maybe(COUNT),
    "files": array(thing(("name", "size", "sha256"), name=STRING, size=COUNT, sha256=maybe(STRING))),
    "progress": maybe(
        thing(
            ("bytes_done", "bytes_total", "bytes_per_sec", "eta_secs", "step"),
            bytes_done=COUNT,
            bytes_total=maybe(COUNT),
            bytes_per_sec=maybe(NUMBER),
            eta_secs=maybe(NUMBER),
            step=STRING,
        )
    ),
    "metadata": maybe({"type": "object"}),
    "last_verified": maybe(TIME),
    "verification_error": maybe(STRING),
    "verification": maybe({"type": "object"}),
    "download_error": maybe(STRING),
    "added_at": maybe(TIME),
}
BYTES = maybe(COUNT)
SCHEMAS: dict[str, Schema] = {
    "Error": thing(("error", "code", "timestamp"), error=STRING, code=STRING, timestamp=TIME),
    "Health": thing(
        ("status", "timestamp"),  # alone for strangers, where open_health lets them ask
        status={"enum": ["healthy", "degraded"]},
        version=STRING,
        instances=thing(("running", "total"), running=COUNT, total=COUNT),
        timestamp=TIME,
        reason=STRING,
    ),
    "Ready": thing(("status", "timestamp"), status={"const": "ready"}, timestamp=TIME),
    "NewInstance": thing(("name", "model_id"), **FIELDS) | {"additionalProperties": False},
    "Instance": thing((*FIELDS, *SHOWN), **FIELDS, **SHOWN),
    "Logs": thing(
        ("lines", "start", "end", "total_lines"), lines=array(STRING), start=COUNT, end=COUNT, total_lines=COUNT
    ),
    "NewModel": thing(("model_id",), model_id=MODEL_ID, revision=maybe({"type": "string", "minLength": 1}))
    | {"additionalProperties": False},
    "Model": thing(tuple(MODEL), **MODEL),
    "NewKey": thing(("name", "role"), name=KEY_NAME, role=ROLE) | {"additionalProperties": False},
    "MadeKey": thing(("name", "role", "key", "listeners"), name=KEY_NAME, role=ROLE, key=STRING, listeners=LISTENERS),
    "Key": thing(("name", "role", "from"), name=KEY_NAME, role=ROLE, **{"from": STRING}),
    "RevokedKey": thing(
        ("name", "role", "left", "listeners"), name=KEY_NAME, role=ROLE, left=COUNT, listeners=LISTENERS
    ),
    "LoadOptions": {
        "type": "object",
        "properties": {key: FIELDS[key] for key in ("pooling", "dtype", "gpu_id", "max_batch_tokens", "engine")},
        "description": "fields of an instance, on top of those of the instance that uses the model",
    },
    "Gpu": thing(
        ("index", "uuid", "name", "memory_total", "memory_used", "memory_free", "utilization", "temperature", "error"),
        index=COUNT,
        uuid=STRING,
        name=maybe(STRING),
        memory_total=BYTES,
        memory_used=BYTES,
        memory_free=BYTES,
        utilization=maybe(NUMBER),
        temperature=maybe({"type": "integer"}),
        error=maybe(STRING),
        replicas=array(thing(("instance", "replica"), instance=STRING, replica=COUNT, memory_used=BYTES)),
    ),
    "Event": thing(
        ("seq", "time", "event", "instance", "message"),
        seq=COUNT,
        time=TIME,
        event=STRING,
        instance=maybe(STRING),
        message=STRING,
    ),
}


def query(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": about}


SWITCH: Schema = {"enum": ["true", "false"]}
INTEGER: Schema = whole(-(10**17), 10**17)
WAIT = query("wait", SWITCH, "false: answer 202 at once, and poll the model")
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

# (path, verb, what it does, parameters, body, answers, refusals)
Route = tuple[str, str, str, list[Schema], str | None, dict[int, Schema], tuple[int, ...]]
BODY = (400, 413, 415)
CHANGE = (503, 507)
INSTANCES = {200: array(ref("Instance"))}
ROUTES: list[Route] = [
    ("/health", "get", "How the appliance is, with counts of instances", [], None, {200: ref("Health")}, ()),
    ("/ready", "get", "Whether supervisor answers", [], None, {200: ref("Ready")}, (503,)),
    ("/metrics", "get", "Prometheus text of all processes", [], None, {200: STRING}, ()),
    ("/instances", "get", "All instances, sorted by name", [], None, INSTANCES, (503,)),
    (
        *("/instances", "post", "Create an instance and start it"),
        [query("dry_run", SWITCH, "true: the same answer (200) and refusals, and nothing is created")],
        *("NewInstance", {200: ref("Instance"), 201: ref("Instance")}, (*BODY, 409, 422, *CHANGE)),
    ),
    ("/instances/{name}", "get", "One instance", [], None, {200: ref("Instance")}, (404, 503)),
    ("/instances/{name}", "delete", "Stop and forget it", [], None, {200: ref("Instance")}, (404, *CHANGE)),
    *(
        (f"/instances/{{name}}/{verb}", "post", about, [], None, {200: ref("Instance")}, (404, 409, *CHANGE))
        for verb, about in (
            ("start", "Let it run; also lifts a quarantine"),
            ("stop", "Stop it until it is started again"),
            ("restart", "Replace its processes by new ones"),
        )
    ),
    (
        *("/instances/{name}/logs", "get", "Lines of a replica's log, as a Python slice"),
        [
            query("start", INTEGER, "first line; negative numbers count from the end"),
            query("end", INTEGER, "the line before which it ends"),
            query("replica", whole(0, 63), "its number"),
        ],
        *(None, {200: ref("Logs")}, (404, 422, 503)),
    ),
    ("/models", "get", "Models that were added or are on this machine", [], None, {200: array(ref("Model"))}, (503,)),
    (
        *("/models", "post", "Add a model; 200 when it is known", [], "NewModel"),
        *({200: ref("Model"), 201: ref("Model")}, (*BODY, 409, 422, 503, 507)),
    ),
    ("/models/{model_id}", "get", "One model", [], None, {200: ref("Model")}, (404, 422, 503)),
    (
        *("/models/{model_id}", "delete", "Forget it, and delete its files from the cache"),
        [query("keep_files", SWITCH, "true: leave the files")],
        *(None, {200: ref("Model")}, (404, 409, 422, 503, 507)),
    ),
    (
        *("/models/{model_id}/download", "post", "Fetch what serving needs, and compare every digest", [WAIT], None),
        *({200: ref("Model"), 202: ref("Model")}, (404, 409, 422, 500, *CHANGE)),
    ),
    (
        *("/models/{model_id}/load", "post", "Prove that it loads and answers", [WAIT], "LoadOptions"),
        *({200: ref("Model"), 202: ref("Model")}, (*BODY, 404, 409, 422, 500, *CHANGE)),
    ),
    (
        *("/models/{model_id}/cancel", "post", "End its download or load", [], None),
        *({200: ref("Model")}, (404, 422, 503, 507)),
    ),
    (
        "/models/{model_id}/archive",
        "get",
        "It and its digests as one tar file",
        [],
        None,
        {200: BINARY},
        (404, 409, 422),
    ),
    (
        *("/archives", "post", "Take a model out of such a file, which is the body"),
        [query("as", STRING, "another id, for what was a folder")],
        *("Archive", {201: ref("Model")}, (400, 409, 422, 507)),
    ),
    ("/keys", "get", "Names and roles of all API keys", [], None, {200: array(ref("Key"))}, (422,)),
    (
        *("/keys", "post", "Make an API key and tell it, once; the first one only from this machine", [], "NewKey"),
        *({201: ref("MadeKey")}, (*BODY, 409, 422, *CHANGE)),
    ),
    ("/keys/{name}", "delete", "Revoke an API key", [], None, {200: ref("RevokedKey")}, (404, 422, *CHANGE)),
    ("/gpus", "get", "NVIDIA GPUs and our replicas on them", [], None, {200: array(ref("Gpu"))}, (503,)),
    (
        *("/events", "get", "What happened, oldest first"),
        [query("since", INTEGER, "only events with a higher seq")],
        *(None, {200: array(ref("Event"))}, (422,)),
    ),
    ("/openapi.json", "get", "This document", [], None, {200: {"type": "object"}}, ()),
]


def operation(route: Route) -> Schema:
    path, verb, about, parameters, body, answers, refusals = route
    kind = "text/plain" if path == "/metrics" else "application/octet-stream" if path.endswith("/archive") else JSON
    found: Schema = {
        "operationId": f"{verb} {path}",
        "summary": about,
        "parameters": [*named(path), *parameters],
        "responses": {str(code): answer(kind, schema, code) for code, schema in answers.items()}
        | {str(code): answer(JSON, ref("Error"), code) for code in sorted({401, 403, *refusals})},
    }
    if body == "Archive":
        found["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": BINARY}}}
    elif body:
        content = {JSON: {"schema": ref(body)}}
        found["requestBody"] = {"required": body != "LoadOptions", "content": content}
    return found


def named(path: str) -> list[Schema]:
    schemas = {"name": STRING, "model_id": STRING | {"description": "one segment: its slash is written %2F"}}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in schemas.items()
        if f"{{{name}}}" in path
    ]


def answer(kind: str, schema: Schema, code: int) -> Schema:
    return {"description": WORDS.get(code, "done"), "content": {kind: {"schema": schema}}}


def document() -> Schema:
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route[0], {})[route[1]] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tei-appliance: management", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": access.SCHEMES | {"key": access.SCHEMES["key"] | {"description": f"Roles: {ROLES}"}},
        },
        "security": [{}, *({name: []} for name in access.SCHEMES)],
    }


class Description:
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, document())
