"""The routes of instances: a part of the table in `routes`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from appliance.control import benchmarks, resources
from appliance.control.openapi import RestOperation, query
from appliance.control.route_parts import BODY, CHANGE, INTEGER, SWITCH, RestRoute
from appliance.control.schema_parts import array, ref
from appliance.core.fields import Schema, whole
from appliance.core.generations import STRATEGIES
from appliance.core.instance import MOST_REPLICAS
from appliance.core.views import InstanceView
from appliance.node import series
from appliance.node.context import Node
from appliance.operations import instances, sleep
from appliance.operations.benchmarks import LONGEST_SECS, SHORTEST_SECS, STEP_SECS

INSTANCE, INSTANCES = ref("Instance"), array(ref("Instance"))
SECONDS: Schema = {"type": "number", "minimum": SHORTEST_SECS, "maximum": LONGEST_SECS}
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


def lifecycle(verb: str, change: Callable[[Node, str], InstanceView], summary: str, *refusals: int) -> RestRoute:
    """POST of a verb that takes nothing but the instance's name. refusals: beyond those of all such verbs."""
    resource = partial(resources.LifecycleResource, change)
    operation = RestOperation(summary, {200: INSTANCE}, (404, 409, *refusals, *CHANGE))
    return RestRoute(f"/instances/{{name}}/{verb}", resource, {"POST": operation})


INSTANCE_ROUTES: tuple[RestRoute, ...] = (
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
    lifecycle("wake", sleep.wake, "Start the processes of one that sleeps", 422)._replace(
        resource=resources.WakeResource
    ),
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
        "/instances/{name}/bench",
        benchmarks.BenchResource,
        {
            "GET": RestOperation(
                "How fast it was when it was measured last: throughput and latency with 1 to 64 requests in flight",
                {200: ref("Benchmark")},
                (404, 422, 503),
            ),
            "POST": RestOperation(
                "Measure it, which takes a quarter of a minute; 202 at once, and GET follows it",
                {202: ref("Benchmark")},
                (404, 409, 422, *CHANGE),
                (
                    query("secs", SECONDS, f"of each step; without it {STEP_SECS:g}"),
                    query("force", SWITCH, "true: also beside the calls of others, who share the machine then"),
                ),
            ),
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
)
