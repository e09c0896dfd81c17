"""What the management API takes and answers, as JSON Schema. What a field may be, its check says (`core.fields`)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from appliance.core.access import NEW_KEY
from appliance.core.fields import Check, Schema
from appliance.core.instance import CHECKS, FIELDS, PORT, InstanceSpec, gpu
from appliance.core.models import NEW_MODEL

NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BINARY: Schema = {"type": "string", "format": "binary"}
NUMBER: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def closed(required: tuple[str, ...], **properties: Schema) -> Schema:
    """What we take: unknown fields are refused."""
    return record(required, **properties) | {"additionalProperties": False}


def maybe(schema: Schema) -> Schema:
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return {"anyOf": [*schema.get("anyOf", [schema]), NULL]}


ABOUT: dict[str, Schema] = {
    "port": {"description": "of the first replica; the others follow"},
    "prometheus_port": {"description": "of the first replica; 0: GET /metrics leaves out what the replicas measure"},
    "token_ids": {"description": "whether HTTP takes token ids in the place of texts"},
    "aliases": {"description": "other names by which requests may ask for it, as for a model id"},
    "default": {"description": "it answers what names nobody, among the instances for its task"},
    "download": {"description": "whether a model that is not on this machine is downloaded, or the instance refused"},
}
DEFAULTS: dict[str, Schema] = {
    field.name: {"default": field.default} for field in fields(InstanceSpec) if type(field.default) in (int, str)
}


def instance_field(name: str, check: Check) -> Schema:
    """Null is the same as absent, unless the field is required."""
    schema = check.schema | DEFAULTS.get(name, {}) | ABOUT.get(name, {})
    return schema if name in FIELDS.required else maybe(schema)


INSTANCE_FIELDS: dict[str, Schema] = {name: instance_field(name, check) for name, check in CHECKS.items()}
KEY_NAME, ROLE = NEW_KEY.checks["name"].schema, NEW_KEY.checks["role"].schema
STATUS: Schema = {"enum": ["downloading", "starting", "running", "unhealthy", "stopping", "stopped", "failed"]}
MODEL_STATUS: Schema = {"enum": ["available", "downloading", "downloaded", "loading", "verified", "failed"]}
LISTENERS = record(
    ("bind", "api_port", "grpc_port", "http_port"),
    bind=STRING,
    api_port=PORT.schema,
    grpc_port=PORT.schema,
    http_port=PORT.schema,
)
REPLICA = record(
    ("index", "port", "prometheus_port", "gpu_id", "pid", "status", "exit_status", "uptime_secs"),
    index=COUNT,
    port=PORT.schema,
    prometheus_port=PORT.schema,
    gpu_id=maybe(gpu.schema),
    pid=maybe(COUNT),
    status=STATUS,
    exit_status=maybe({"type": "integer"}),
    uptime_secs=maybe(COUNT),
)
SHOWN: dict[str, Schema] = {
    "status": STATUS,
    "pid": maybe(COUNT),
    "created_at": TIME,
    "uptime_secs": maybe(COUNT),
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
    "files": array(record(("name", "size", "sha256"), name=STRING, size=COUNT, sha256=maybe(STRING))),
    "progress": maybe(
        record(
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
    "added_at": TIME,
}
BYTES = maybe(COUNT)
SCHEMAS: dict[str, Schema] = {
    "Error": record(("error", "code", "timestamp"), error=STRING, code=STRING, timestamp=TIME),
    "Health": record(
        ("status", "timestamp"),  # alone for strangers, where open_health lets them ask
        status={"enum": ["healthy", "degraded"]},
        version=STRING,
        instances=record(("running", "total"), running=COUNT, total=COUNT),
        timestamp=TIME,
        reason=STRING,
    ),
    "Ready": record(("status", "timestamp"), status={"const": "ready"}, timestamp=TIME),
    "NewInstance": closed(FIELDS.required, **INSTANCE_FIELDS),
    "Instance": record((*CHECKS, *SHOWN), **INSTANCE_FIELDS, **SHOWN),
    "Logs": record(
        ("lines", "start", "end", "total_lines"), lines=array(STRING), start=COUNT, end=COUNT, total_lines=COUNT
    ),
    "NewModel": closed(
        NEW_MODEL.required,
        model_id=NEW_MODEL.checks["model_id"].schema,
        revision=maybe(NEW_MODEL.checks["revision"].schema),
    ),
    "Model": record(tuple(MODEL), **MODEL),
    "NewKey": closed(NEW_KEY.required, name=KEY_NAME, role=ROLE),
    "MadeKey": record(("name", "role", "key", "listeners"), name=KEY_NAME, role=ROLE, key=STRING, listeners=LISTENERS),
    "Key": record(("name", "role", "from"), name=KEY_NAME, role=ROLE, **{"from": STRING}),
    "RevokedKey": record(
        ("name", "role", "left", "listeners"), name=KEY_NAME, role=ROLE, left=COUNT, listeners=LISTENERS
    ),
    "LoadOptions": {
        "type": "object",
        "properties": {
            key: INSTANCE_FIELDS[key] for key in ("pooling", "dtype", "gpu_id", "max_batch_tokens", "engine")
        },
        "description": "fields of an instance, on top of those of the instance that uses the model",
    },
    "Gpu": record(
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
        replicas=array(record(("instance", "replica"), instance=STRING, replica=COUNT, memory_used=BYTES)),
    ),
    "Event": record(
        ("seq", "time", "event", "instance", "message"),
        seq=COUNT,
        time=TIME,
        event=STRING,
        instance=maybe(STRING),
        message=STRING,
    ),
}
