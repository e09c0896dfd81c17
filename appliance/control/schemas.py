"""What the management API takes and answers, as JSON Schema. What a field may be, its check says (`core.fields`)."""

from __future__ import annotations

from dataclasses import fields

from appliance.control.machine_schemas import MACHINE_SCHEMAS
from appliance.control.schema_parts import COUNT, FLAG, NUMBER, STRING, TIME, array, closed, maybe, record, told
from appliance.core.access import NEW_KEY
from appliance.core.fields import Check, Schema, whole
from appliance.core.generations import STRATEGIES
from appliance.core.instance import CHECKS, FIELDS, PORT, PROGRAMS, InstanceSpec, gpu
from appliance.core.layout import JOB_PREFIX
from appliance.core.models import NEW_MODEL

ABOUT = {
    "name": f"by which paths and calls name it; not {', '.join(PROGRAMS)}, and not beginning with {JOB_PREFIX}",
    "model_id": "hub id or local folder",
    "revision": "branch, tag or commit of the hub; without it main",
    "port": "of the first replica, the others follow; 0 or none: chosen",
    "gpu_id": "the GPU of all replicas: its number on the PCI bus, or its UUID",
    "gpu_ids": "the GPUs that the replicas take in turn; auto: those with the most free memory, chosen once",
    "replicas": "processes that serve the model",
    "max_batch_tokens": "most tokens of one batch of a replica",
    "max_concurrent_requests": "most texts that a replica has in work at once",
    "pooling": "how the vectors of tokens become one; without it as the model says",
    "dtype": "what is computed in; without it as the engine does by itself",
    "prometheus_port": "of the first replica, the others follow; 0: GET /metrics leaves out what the replicas measure",
    "startup_timeout_secs": "how long a replica may take to open its port; without it the setting of that name",
    "engine": "TEI's binary, or our own; without it TEI's where that is installed",
    "extra_args": "further flags of the engine",
    "token_ids": "whether HTTP takes token ids in the place of texts",
    "download": "whether a model that is not on this machine is downloaded, or the instance refused",
    "aliases": "other names by which requests may ask for it, as for a model id",
    "request_logs": "whether TEI writes a line for each request into its log",
    "express": "whether single gRPC calls go through Envoy straight to a replica (extra `express`)",
    "cache": "whether its embeddings are kept and not computed again (docs/cache.md)",
    "start": "eager: it runs at once; on_demand: it sleeps until the first call, and gives its memory up for others",
    "idle_unload_secs": "after so long without a call it sleeps, until the next one; 0: never",
    "undo_secs": "so long what it was before is kept ready for an undo, after it was replaced beside that",
    "default": "it answers what names nobody, among the instances for its task",
    "max_replicas": "on a cluster: as many while texts wait, and replicas when they do not",
    "node_labels": "on a cluster: KEY=VALUE of the machines on which its replicas may run",
}
OF_INSTANCE = {
    "status": "the best of its replicas'; unhealthy: gets no traffic; failed: last_error says why",
    "pid": "of its first replica that has a process",
    "created_at": "when it was created",
    "uptime_secs": "how long that process runs",
    "generation": "rises each time its fields were replaced by others that need new processes",
    "restarts": "how often processes of it were replaced: asked for, after a death, by the monitor",
    "health_check_failures": "probes missed in a row, of the worst replica",
    "last_health_check": "when the last probe ended",
    "last_error": "why a replica does not run, with the last lines of its log",
    "progress": "of the download of its model, while that is at work",
    "load_secs": "what a replica took to load, when it was started last; null: not measured yet",
    "rolling": "replicas that a rolling restart has not reached yet",
    "replacement": "the generation that starts beside it and takes over when it answers: what is other, and what it "
    "takes in bytes by place; with dry_run what would be done",
    "undo": "what an undo would change; until ready_until it finds its processes there, else it starts them",
    "replicas_ready": "replicas that answer",
    "replica_list": "each replica with its ports, GPU, process and status",
}
OF_MODEL = {
    "model_id": "hub id, or absolute path of a folder",
    "revision": "to which it is pinned; null: main",
    "commit": "of the hub, whose files are here",
    "source": "where its files are: in the hub's cache, in a folder, in a package",
    "status": "available: not (completely) here; verified, failed: how its last load went, or a file is not as it was",
    "downloaded": "whether every file that serving needs is here",
    "cache_path": "folder of its files",
    "cache_size_bytes": "of these files together",
    "files": "each with its size, and its SHA-256 as far as that was taken",
    "progress": "of the download or load that is at work",
    "metadata": "what its folder says of it: task, architecture, dimensions and the like",
    "last_verified": "when a load of it last worked",
    "verification_error": "why its last load failed, or which file is wrong",
    "verification": "what its last load measured: dimensions, seconds, memory",
    "download_error": "why its last download failed",
    "added_at": "when it was added, or came to this machine",
}
DEFAULTS: dict[str, Schema] = {
    field.name: {"default": field.default} for field in fields(InstanceSpec) if type(field.default) in (int, str)
}


def instance_field(name: str, check: Check) -> Schema:
    """Null is the same as absent, unless the field is required."""
    schema = check.schema | DEFAULTS.get(name, {}) | {"description": ABOUT[name]}
    return schema if name in FIELDS.required else maybe(schema)


INSTANCE_FIELDS: dict[str, Schema] = {name: instance_field(name, check) for name, check in CHECKS.items()}
KEY_NAME = NEW_KEY.checks["name"].schema | {"description": "of the key, which the audit names"}
ROLE = NEW_KEY.checks["role"].schema | {"description": "what the key may do: docs/security.md"}
STATUS: Schema = {
    "enum": ["downloading", "starting", "running", "unhealthy", "stopping", "sleeping", "stopped", "failed"]
}
MODEL_STATUS: Schema = {"enum": ["available", "downloading", "downloaded", "loading", "verified", "failed"]}
LISTENERS = record(
    ("bind", "api_port", "grpc_port", "http_port", "cert_file", "require_client_cert"),
    bind=STRING,
    api_port=PORT.schema,
    grpc_port=PORT.schema,
    http_port=PORT.schema,
    cert_file=STRING | {"description": "of TLS; empty: they are plain"},
    require_client_cert=FLAG,
)
LISTENING = whole(0, 65535).schema  # 0: nobody knows yet
REPLICA = record(
    ("index", "address", "port", "prometheus_port", "gpu_id", "pid", "status", "exit_status", "uptime_secs"),
    index=COUNT,
    address=maybe(STRING),
    port=LISTENING,
    prometheus_port=LISTENING,
    gpu_id=maybe(gpu.schema),
    pid=maybe(COUNT),
    status=STATUS,
    exit_status=maybe({"type": "integer"}),
    uptime_secs=maybe(COUNT),
)
PROGRESS = record(
    ("bytes_done", "bytes_total", "bytes_per_sec", "eta_secs", "step"),
    bytes_done=COUNT,
    bytes_total=maybe(COUNT),
    bytes_per_sec=maybe(NUMBER),
    eta_secs=maybe(NUMBER),
    step=STRING,
)
REPLACEMENT = record(
    ("strategy", "generation", "changes", "needs", "status", "replicas_ready"),
    strategy={"enum": list(STRATEGIES)},
    generation=COUNT,
    changes=array(STRING),
    needs={"type": "object", "additionalProperties": COUNT},
    status=maybe(STATUS),
    replicas_ready=COUNT,
)
UNDO = record(("changes", "ready_until"), changes=array(STRING), ready_until=maybe(TIME))
SHOWN: dict[str, Schema] = {
    "status": STATUS,
    "pid": maybe(COUNT),
    "created_at": TIME,
    "uptime_secs": maybe(COUNT),
    "generation": COUNT,
    "restarts": COUNT,
    "health_check_failures": COUNT,
    "last_health_check": maybe(TIME),
    "last_error": maybe(STRING),
    "progress": maybe(PROGRESS),
    "load_secs": maybe(NUMBER),
    "rolling": array(COUNT),
    "replacement": maybe(REPLACEMENT),
    "undo": maybe(UNDO),
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
    "progress": maybe(PROGRESS),
    "metadata": maybe({"type": "object"}),
    "last_verified": maybe(TIME),
    "verification_error": maybe(STRING),
    "verification": maybe({"type": "object"}),
    "download_error": maybe(STRING),
    "added_at": TIME,
}
FINGERPRINT: dict[str, Schema] = {"fingerprint": maybe(STRING), "why_no_fingerprint": maybe(STRING)}
OF_FINGERPRINT = {
    "fingerprint": "of all that decides its vectors; told of one instance that is asked for, and not in lists",
    "why_no_fingerprint": "why it is not known, and nothing is cached",
}
FINGERPRINTED = record(
    ("instance", "fingerprint", "parts"),
    instance=STRING,
    fingerprint=STRING,
    parts={"type": "object", "additionalProperties": STRING},
)
CACHE: dict[str, Schema] = {
    "enabled": FLAG,
    "store": STRING,
    "scope": STRING,
    "max_mb": COUNT,
    "ttl_secs": COUNT,
    "entries": maybe(COUNT),
    "size_bytes": maybe(COUNT),
    "hits": COUNT,
    "misses": COUNT,
    "bypassed": COUNT,
    "joined": COUNT,
    "saved_secs": NUMBER,
    "failure": maybe(STRING),
    "instances": array(
        record(
            ("name", "cached", "fingerprint", "why"),
            name=STRING,
            cached=FLAG,
            fingerprint=maybe(STRING),
            why=maybe(STRING),
        )
    ),
}
OF_CACHE = {
    "enabled": "whether embeddings are kept at all",
    "store": "where: sqlite, redis, qdrant or none",
    "scope": "whose entries a caller may get: all, or those of his key",
    "max_mb": "size that the store sqlite may have, in MiB",
    "ttl_secs": "age after which an entry is computed again; 0: never",
    "entries": "that are there; null: the store cannot tell",
    "size_bytes": "that they take",
    "hits": "texts that were answered from the cache",
    "misses": "texts that were computed, and kept",
    "bypassed": "texts that were computed without a look at the cache",
    "joined": "calls that waited for another call's computation of the same text",
    "saved_secs": "that hits would have taken to compute",
    "failure": "why the store does not answer just now",
    "instances": "each with its fingerprint, or why nothing of it is cached",
}
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
    "ChangedInstance": closed(
        (), **{**INSTANCE_FIELDS, **{name: maybe(INSTANCE_FIELDS[name]) for name in FIELDS.required}}
    ),
    "Instance": record(
        (*CHECKS, *SHOWN), **INSTANCE_FIELDS, **told(OF_INSTANCE, SHOWN), **told(OF_FINGERPRINT, FINGERPRINT)
    ),
    "Logs": record(
        ("lines", "start", "end", "total_lines"), lines=array(STRING), start=COUNT, end=COUNT, total_lines=COUNT
    ),
    "NewModel": closed(
        NEW_MODEL.required,
        model_id=NEW_MODEL.checks["model_id"].schema | {"description": OF_MODEL["model_id"]},
        revision=maybe(NEW_MODEL.checks["revision"].schema | {"description": ABOUT["revision"]}),
    ),
    "Model": record(tuple(MODEL), **told(OF_MODEL, MODEL)),
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
    "Cache": record(tuple(CACHE), **told(OF_CACHE, CACHE)),
    "Deleted": record(("deleted",), deleted=COUNT),
    "Compatibility": record(
        ("compatible", "differing", "a", "b"),
        compatible=FLAG,
        differing=array(STRING),
        a=FINGERPRINTED,
        b=FINGERPRINTED,
    ),
    **MACHINE_SCHEMAS,
}
