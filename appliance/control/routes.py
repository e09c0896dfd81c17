"""Every route of the management API, once: its path, its resource, what its caller needs, and its words for OpenAPI.

The router, the access rules and `/openapi.json` read this table. What a method needs is the same on most paths
(`METHOD_NEEDS`); a route that departs from it says what all of its methods need. What is on no route needs what its
method needs: a caller is refused, or told that there is nothing.
"""

from __future__ import annotations

from falcon.routing import CompiledRouter

from appliance.control import cache, keys, models, openapi, resources, streaming
from appliance.control.instance_routes import INSTANCE_ROUTES
from appliance.control.metrics import MetricsResource
from appliance.control.openapi import EVENT_STREAM, OCTETS, PLAIN, RestOperation, header, query
from appliance.control.route_parts import BODY, CHANGE, INTEGER, SWITCH, RestRoute
from appliance.control.schema_parts import BINARY, STRING, array, ref
from appliance.core.access import Need
from appliance.core.fields import Schema, whole
from appliance.drivers.httpserver import with_head
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

METHOD_NEEDS = {"GET": Need.READ, "HEAD": Need.READ, "OPTIONS": Need.READ, "DELETE": Need.ADMIN}
OTHERS_NEED = Need.OPERATE


MODEL = ref("Model")
WAIT = (query("wait", SWITCH, "false: answer 202 at once, and poll the model"),)

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
    *INSTANCE_ROUTES,
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
        "/doctor",
        resources.DoctorResource,
        {
            "GET": RestOperation(
                "What on this machine keeps the appliance from working, and how to mend it",
                {200: array(ref("Finding"))},
                (422,),
            )
        },
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
        "/events/stream",
        streaming.EventStreamResource,
        {
            "GET": RestOperation(
                "What happens, as it happens: server-sent events, each with the JSON of one event and its seq as id",
                {200: STRING},
                (422, 503),
                (
                    query("since", INTEGER, "first those with a higher seq; without it those from now on"),
                    header("Last-Event-ID", whole(0, 10**17).schema, "the same, as browsers say it; it goes first"),
                ),
                media_type=EVENT_STREAM,
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
