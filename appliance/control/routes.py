"""Every route of the management API, once: its path, its resource, what its caller needs, and its words for OpenAPI.

The router, the access rules and `/openapi.json` read this table. What a method needs is the same on most paths
(`METHOD_NEEDS`); a route that departs from it says what all of its methods need. What is on no route needs what its
method needs: a caller is refused, or told that there is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from falcon.routing import CompiledRouter

from appliance.control import cache, keys, models, openapi, resources
from appliance.control.metrics import MetricsResource
from appliance.control.openapi import OCTETS, PLAIN, RestOperation, query
from appliance.control.schema_parts import BINARY, STRING, array, ref
from appliance.core.access import Need
from appliance.core.fields import Schema, whole
from appliance.core.generations import STRATEGIES
from appliance.core.instance import MOST_REPLICAS
from appliance.core.views import InstanceView
from appliance.drivers.httpserver import with_head
from appliance.node import series
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import instances, sleep

METHOD_NEEDS = {"GET": Need.READ, "HEAD": Need.READ, "OPTIONS": Need.READ, "DELETE": Need.ADMIN}
OTHERS_NEED = Need.OPERATE


class RestRoute(NamedTuple):
    """need: of all its methods, where it is not that of METHOD_NEEDS. operations: by method."""

    path: str
    resource: Callable[[Node, Authenticator], object]
    operations: Mapping[str, RestOperation]
    need: Need | None = None


SWITCH: Schema = {"enum": ["true", "false"]}
INTEGER = whole(-(10**17), 10**17).schema
STRATEGY = query(
    "strategy",
    {"enum": list(STRATEGIES)},
    "beside: the new processes start beside the old ones and take over when they answer; in_place: the old ones end "
    "first, and calls wait. Without it beside, where there is room for both",
)
REPLACING = (
    query("dry_run", SWITCH, "true: the same answer and refusals, and nothing changes"),
    query("allow_incompatible", SWITCH, "true: also where its vectors become others, which fit no index made so far"),
    STRATEGY,
)
WAIT = (query("wait", SWITCH, "false: answer 202 at once, and poll the model"),)

BODY = (400, 413, 415)  # refusals of whatever has a body
CHANGE = (503, 507)  # and of whatever changes something
INSTANCE, INSTANCES, MODEL = ref("Instance"), array(ref("Instance")), ref("Model")


def lifecycle(verb: str, change: Callable[[Node, str], InstanceView], summary: str, *refusals: int) -> RestRoute:
    """POST of a verb that takes nothing but the instance's name. refusals: beyond those of all such verbs."""
    resource = partial(resources.LifecycleResource, change)
    operation = RestOperation(summary, {200: INSTANCE}, (404, 409, *refusals, *CHANGE))
    return RestRoute(f"/instances/{{name}}/{verb}", resource, {"POST": operation})


ROUTES: tuple[RestRoute, ...] = (
    RestRoute(
        "/health",
        resources.HealthResource,
        {"GET": RestOperation("How the appliance is, with counts of instances", {200: ref("Health")})},
        Need.OPEN,
    ),
    RestRoute(
        "/ready",
        resources.ReadyResource,
        {"GET": RestOperation("Whether supervisor answers", {200: ref("Ready")}, (503,))},
        Need.OPEN,
    ),
    RestRoute(
        "/metrics",
        MetricsResource,
        {"GET": RestOperation("Prometheus text of all processes", {200: STRING}, media_type=PLAIN)},
    ),
    RestRoute(
        "/instances",
        resources.InstancesResource,
        {
            "GET": RestOperation("All instances, sorted by name", {200: INSTANCES}, (503,)),
            "POST": RestOperation(
                "Create an instance and start it",
                {200: INSTANCE, 201: INSTANCE},
                (*BODY, 409, 422, *CHANGE),
                (query("dry_run", SWITCH, "true: the same answer (200) and refusals, and nothing is created"),),
                body="NewInstance",
            ),
        },
    ),
    RestRoute(
        "/instances/{name}",
        resources.InstanceResource,
        {
            "GET": RestOperation("One instance", {200: INSTANCE}, (404, 503)),
            "PATCH": RestOperation(
                "Give fields of it other values; where that needs new processes they take over when they answer",
                {200: INSTANCE},
                (*BODY, 404, 409, 422, *CHANGE),
                REPLACING,
                body="ChangedInstance",
            ),
            "PUT": RestOperation(
                "The same with all fields: those that are left out have their defaults",
                {200: INSTANCE},
                (*BODY, 404, 409, 422, *CHANGE),
                REPLACING,
                body="ChangedInstance",
            ),
            "DELETE": RestOperation("Stop and forget it", {200: INSTANCE}, (404, *CHANGE)),
        },
    ),
    lifecycle("start", instances.start, "Let it run; also lifts a quarantine", 422),
    lifecycle("stop", instances.stop, "Stop it until it is started again"),
    RestRoute(
        "/instances/{name}/restart",
        resources.RestartResource,
        {
            "POST": RestOperation(
                "Replace its processes by new ones",
                {200: INSTANCE},
                (404, 409, 422, *CHANGE),
                (query("rolling", SWITCH, "true: one after the other; without it where there are several replicas"),),
            )
        },
    ),
    RestRoute(
        "/instances/{name}/undo",
        resources.UndoResource,
        {
            "POST": RestOperation(
                "Back to what it was before it was replaced; gives up a generation that is still starting",
                {200: INSTANCE},
                (404, 409, 422, *CHANGE),
                (STRATEGY,),
            )
        },
    ),
    lifecycle("sleep", sleep.sleep, "End its processes until it is called"),
    lifecycle("wake", sleep.wake, "Start the processes of one that sleeps", 422),
    RestRoute(
        "/instances/{name}/series",
        resources.SeriesResource,
        {
            "GET": RestOperation(
                "What it did in the last minutes: rates, latency, queue, memory",
                {200: ref("Series")},
                (404, 422, 503),
                (query("minutes", whole(1, series.LONGEST_MINUTES).schema, "how far back; without it an hour"),),
            )
        },
    ),
    RestRoute(
        "/instances/{name}/logs",
        resources.LogsResource,
        {
            "GET": RestOperation(
                "Lines of a replica's log, as a Python slice",
                {200: ref("Logs")},
                (404, 422, 503),
                (
                    query("start", INTEGER, "first line; negative numbers count from the end"),
                    query("end", INTEGER, "the line before which it ends"),
                    query("replica", whole(0, MOST_REPLICAS - 1).schema, "its number"),
                ),
            )
        },
    ),
    RestRoute(
        "/models",
        models.ModelsResource,
        {
            "GET": RestOperation("Models that were added or are on this machine", {200: array(MODEL)}, (503,)),
            "POST": RestOperation(
                "Add a model; 200 when it is known",
                {200: MODEL, 201: MODEL},
                (*BODY, 409, 422, *CHANGE),
                body="NewModel",
            ),
        },
    ),
    RestRoute(
        "/models/{model_id}",
        models.ModelResource,
        {
            "GET": RestOperation("One model", {200: MODEL}, (404, 422, 503)),
            "DELETE": RestOperation(
                "Forget it, and delete its files from the cache",
                {200: MODEL},
                (404, 409, 422, *CHANGE),
                (query("keep_files", SWITCH, "true: leave the files"),),
            ),
        },
    ),
    RestRoute(
        "/models/{model_id}/download",
        models.DownloadResource,
        {
            "POST": RestOperation(
                "Fetch what serving needs, and compare every digest",
                {200: MODEL, 202: MODEL},
                (404, 409, 422, 500, *CHANGE),
                WAIT,
            )
        },
    ),
    RestRoute(
        "/models/{model_id}/load",
        models.LoadResource,
        {
            "POST": RestOperation(
                "Prove that it loads and answers",
                {200: MODEL, 202: MODEL},
                (*BODY, 404, 409, 422, 500, *CHANGE),
                WAIT,
                body="LoadOptions",
                body_required=False,
            )
        },
    ),
    RestRoute(
        "/models/{model_id}/cancel",
        models.CancelResource,
        {"POST": RestOperation("End its download or load", {200: MODEL}, (404, 422, *CHANGE))},
    ),
    RestRoute(
        "/models/{model_id}/archive",
        models.ArchiveResource,
        {"GET": RestOperation("It and its digests as one tar file", {200: BINARY}, (404, 422, 503), media_type=OCTETS)},
        Need.OPERATE,
    ),
    RestRoute(
        "/archives",
        models.ArchivesResource,
        {
            "POST": RestOperation(
                "Take a model out of such a file, which is the body",
                {201: MODEL},
                (400, 409, 422, *CHANGE),
                (query("as", STRING, "another id, for what was a folder"),),
                body_type=OCTETS,
            )
        },
    ),
    RestRoute(
        "/keys",
        keys.KeysResource,
        {
            "GET": RestOperation("Names and roles of all API keys", {200: array(ref("Key"))}, (422,)),
            "POST": RestOperation(
                "Make an API key and tell it, once; the first one only from this machine",
                {201: ref("MadeKey")},
                (*BODY, 409, 422, *CHANGE),
                body="NewKey",
            ),
        },
        Need.ADMIN,
    ),
    RestRoute(
        "/keys/{name}",
        keys.KeyResource,
        {"DELETE": RestOperation("Revoke an API key", {200: ref("RevokedKey")}, (404, 422, *CHANGE))},
        Need.ADMIN,
    ),
    RestRoute(
        "/cache",
        cache.CacheResource,
        {
            "GET": RestOperation("What is cached, and what that has saved", {200: ref("Cache")}, (503,)),
            "DELETE": RestOperation(
                "Forget cached embeddings: all, or those of an instance and of all that compute the same",
                {200: ref("Deleted")},
                (404, 409, 422, *CHANGE),
                (query("instance", STRING, "its name"),),
            ),
        },
    ),
    RestRoute(
        "/compatibility",
        cache.CompatibilityResource,
        {
            "GET": RestOperation(
                "Whether vectors of two instances go together, and what differs",
                {200: ref("Compatibility")},
                (404, 409, 422, 503),
                (query("a", STRING, "name of an instance"), query("b", STRING, "name of another")),
            )
        },
    ),
    RestRoute(
        "/gpus",
        resources.GpusResource,
        {"GET": RestOperation("NVIDIA GPUs and our replicas on them", {200: array(ref("Gpu"))}, (503,))},
    ),
    RestRoute(
        "/events",
        resources.EventsResource,
        {
            "GET": RestOperation(
                "What happened, oldest first",
                {200: array(ref("Event"))},
                (422,),
                (query("since", INTEGER, "only events with a higher seq"),),
            )
        },
    ),
    RestRoute(
        "/openapi.json",
        lambda node, authenticator: openapi.RestDescriptionResource(document()),
        {"GET": RestOperation("This document", {200: {"type": "object"}})},
    ),
)
NEEDS = {route.path: route.need for route in ROUTES}


def document() -> Schema:
    """The OpenAPI document of this table."""
    return openapi.document({route.path: route.operations for route in ROUTES})


def router(node: Node, authenticator: Authenticator) -> CompiledRouter:
    """Falcon's router of this table."""
    paths = CompiledRouter()
    for route in ROUTES:
        paths.add_route(route.path, with_head(route.resource(node, authenticator)))
    return paths


def need_of(paths: CompiledRouter, method: str, path: str) -> Need:
    """What a request needs, also one that no route answers. ``paths``: see `router`.

    Asked of the very router that dispatches, which takes //keys for /keys. Open is a path only as it is written here.
    """
    match = paths.find(path)
    need = NEEDS[match[3] or ""] if match else None
    if need is None or (need is Need.OPEN and path not in NEEDS):
        return METHOD_NEEDS.get(method, OTHERS_NEED)
    return need
