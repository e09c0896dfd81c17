"""Desired state -> the tables that Envoy follows: the clusters, with the replicas that are ready, and the routes.

A call of the lane goes to the replicas of its instance (priority 0) and, where none of them takes it, to the
multiplexer (priority 1), which has the queue and the other tries. Measured with Envoy 1.40:

- A replica that is killed resets what it had: `reset`, too, is tried again, because inference may be repeated. Of what
  has gone on to the caller nothing is; so replies are held until they are whole (`whole_replies`).
- Each try leaves out the priorities of the tries before it: the second one is at the multiplexer, however many replicas
  died. Its refusals end the call (`wire.envelope.FINAL`); where it is away itself, the next tries come ever later.
- What a circuit breaker refuses is never tried again, so there is none: a full replica says so itself.
- A cluster that is replaced keeps its connections until their calls have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.core.access import CREDENTIALS
from appliance.core.budget import SLOWEST_BYTES
from appliance.core.program import LOOPBACK
from appliance.export.express_lane import EXTENSION, TYPE, Config, ExpressLane, exact, express_methods, extension, paths
from appliance.wire.envelope import CERTIFICATE_KEY, EXPRESS_ADMITTED, EXPRESS_KEY, FINAL, INSTANCE_KEY, MODEL_KEY

CLUSTERS, ROUTES = "clusters.json", "routes.json"  # the files
MULTIPLEXER_CLUSTER = "multiplexer"
DIRECT_KEY = "direct"  # in the metadata of an endpoint: whether it is a replica, "True" or "False"
OWN_HEADERS = ["x-forwarded-proto", "x-envoy-external-address"]  # Envoy adds them; they are for nobody here
UNBOUNDED = 2**31 - 1
FRAME_BYTES = 64 * 1024  # on top of the largest message: what is around it
WINDOW_BYTES = 16 * 1024 * 1024  # of a stream of Envoy's, which it holds in any case (1.40)
RETURN_TRIES = 120  # some 15 s, with pauses of 0.125 s on average: so long the gateway waits for the multiplexer, too
LATE_SECS = 1  # that the multiplexer has to end a call itself


def clusters(lane: ExpressLane, ports: Mapping[str, Sequence[int]]) -> list[Config]:
    """One for each instance of the lane, and the multiplexer's. ports: of the ready replicas, by instance."""
    multiplexers = [{"pipe": {"path": path}} for path in lane.multiplexer_sockets]
    return [
        cluster(MULTIPLEXER_CLUSTER, [multiplexers]),
        *(
            cluster(
                name,
                [[{"socket_address": {"address": LOOPBACK, "port_value": port}} for port in own], multiplexers],
                whole_replies(),
            )
            for name, own in ports.items()
        ),
    ]


def cluster(name: str, priorities: Sequence[Sequence[Config]], filters: Sequence[Config] = ()) -> Config:
    """priorities: the addresses of each; the second one is used where the first has none or has failed. filters: what
    each try goes through."""
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), UNBOUNDED)
    endpoints = [
        {
            "priority": priority,
            "lb_endpoints": [
                {
                    "endpoint": {"address": address},
                    # In the name of what Envoy has measured: who answered in the end.
                    "metadata": {"filter_metadata": {"tei.express": {DIRECT_KEY: str("socket_address" in address)}}},
                }
                for address in addresses
            ],
        }
        for priority, addresses in enumerate(priorities)
    ]
    return {
        "@type": TYPE + "envoy.config.cluster.v3.Cluster",
        "name": cluster_name(name),
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": cluster_name(name), "endpoints": endpoints},
        "typed_extension_protocol_options": {
            f"{EXTENSION}.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPE}{EXTENSION}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
                "http_filters": [*filters],
            }
        },
    }


def whole_replies() -> list[Config]:
    """Filters that hold each reply until it is whole, of up to `largest_reply` bytes.

    A server may send the headers of a reply before the rest. Once they have gone on no other replica can be asked: a
    caller whose replica was killed between the two got INTERNAL.
    """
    held = {"inline_string": "function envoy_on_response(handle) handle:body() end"}
    return [
        extension("envoy.filters.http.lua", f"{EXTENSION}.filters.http.lua.v3.Lua", default_source_code=held),
        extension("envoy.filters.http.upstream_codec", f"{EXTENSION}.filters.http.upstream_codec.v3.UpstreamCodec"),
    ]


def largest_reply(lane: ExpressLane) -> int:
    """Bytes of a reply that Envoy holds: of a larger one it sends nothing, and ends the call."""
    return max(lane.largest_message, WINDOW_BYTES)


def cluster_name(name: str) -> str:
    """Of an instance's cluster; the multiplexer's has a name that no instance may have."""
    return name if name == MULTIPLEXER_CLUSTER else f"instance:{name}"


def routes(lane: ExpressLane, names: Sequence[str]) -> Config:
    """names: of the instances of the lane."""
    return {
        "@type": TYPE + "envoy.config.route.v3.RouteConfiguration",
        "name": "grpc",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "request_body_buffer_limit": lane.largest_message + FRAME_BYTES,
                "routes": [
                    *(direct_route(lane, name) for name in names),
                    *(judged_route(lane, path, names) for method in express_methods() for path in paths(method)),
                    other_route(),
                ],
            }
        ],
    }


def direct_route(lane: ExpressLane, name: str) -> Config:
    """For calls that the script has admitted."""
    order = extension(
        "envoy.retry_priorities.previous_priorities",
        f"{EXTENSION}.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
        update_frequency=1,
    )
    return {
        "match": {
            "prefix": "/",
            "headers": [exact(INSTANCE_KEY, name), exact(EXPRESS_KEY, EXPRESS_ADMITTED)],
        },
        "route": {
            "cluster": cluster_name(name),
            "timeout": "0s",
            **deadline(lane.timeout_secs and lane.timeout_secs + LATE_SECS),
            "retry_policy": {
                # A replica that cancels a call is ending.
                "retry_on": "connect-failure,refused-stream,reset,resource-exhausted,unavailable,cancelled",
                "num_retries": RETURN_TRIES,
                "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.25s"},
                "retry_priority": order,
            },
        },
        "request_headers_to_remove": [*OWN_HEADERS, *CREDENTIALS, CERTIFICATE_KEY, MODEL_KEY, "user-agent"],
        "response_headers_to_remove": [FINAL[0]],
        "response_headers_to_add": [
            {"header": {"key": INSTANCE_KEY, "value": name}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ],
    }


def deadline(longest_secs: int) -> Config:
    """Of a route: the caller's, or this one if it is nearer; 0: none. It goes along as grpc-timeout."""
    if not longest_secs:
        return {"max_stream_duration": {"grpc_timeout_header_max": "0s"}}  # the caller's alone
    limit = f"{longest_secs}s"
    return {"max_stream_duration": {"max_stream_duration": limit, "grpc_timeout_header_max": limit}}


def judged_route(lane: ExpressLane, path: str, names: Sequence[str]) -> Config:
    """For single calls as they come. The script asks for the names in its metadata; what it does not admit goes to the
    multiplexer, like all other calls. But the script waits for the message, and half of one must not stay for ever.

    What a multiplexer had when it was killed goes to the next one: inference may be repeated."""
    longest = lane.timeout_secs and lane.timeout_secs + lane.largest_message // SLOWEST_BYTES + LATE_SECS
    base = to_multiplexer("connect-failure,refused-stream,reset")
    return base | {
        # What is no call at all the multiplexer resets, each time that it comes.
        "match": {"path": path, "headers": [exact(":method", "POST")]},
        "metadata": {"filter_metadata": {"envoy.filters.http.lua": dict.fromkeys(names, "direct")}},
        "route": base["route"] | deadline(longest),
    }


def other_route() -> Config:
    """For all other calls: streams and batches, of which a part may have been answered, are not sent twice."""
    return to_multiplexer("connect-failure,refused-stream") | {"match": {"prefix": "/"}}


def to_multiplexer(retry_on: str) -> Config:
    """A route to it, without what it matches."""
    return {
        "request_headers_to_remove": OWN_HEADERS,
        "route": {
            "cluster": MULTIPLEXER_CLUSTER,
            "timeout": "0s",
            # A multiplexer that is being started again is there in a second or two, where the cores are not busy.
            "retry_policy": {
                "retry_on": retry_on,
                "num_retries": RETURN_TRIES,
                "retry_back_off": {"base_interval": "0.05s", "max_interval": "0.25s"},
            },
        },
    }


def resources(values: Sequence[Config]) -> Config:
    """A table as Envoy reads it from a file."""
    return {"resources": list(values)}
