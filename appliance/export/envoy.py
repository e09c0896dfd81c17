"""Desired state -> Envoy's configuration: its listener on the gRPC port, which Envoy (1.40) reads at its start only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.export.envoy_tables import CLUSTERS, DIRECT_KEY, ROUTES, UNBOUNDED, clusters, largest_reply, routes
from appliance.export.express_lane import (
    EXTENSION,
    TYPE,
    VALID_SECS,
    Config,
    ExpressLane,
    exact,
    express_methods,
    extension,
    paths,
)
from appliance.wire.calls import Code
from appliance.wire.envelope import CODE_KEY, EXPRESS_ADMITTED, EXPRESS_INSIDE, EXPRESS_JUDGE, EXPRESS_KEY, INSTANCE_KEY

SERVER_SECRET, CLIENTS_SECRET = "server", "clients"
CALLS, DURATIONS = "calls", "durations"  # what Envoy measures of the calls that replicas have answered
OWN_BYTES = 128 * 1024 * 1024  # that Envoy needs without any call
HANG_TIMEOUT = "10s"
# Callers with short deadlines reset many calls; for that Envoy would end the connection of all their calls.
RUNTIME = {"layers": [{"name": "own", "static_layer": {"overload.premature_reset_total_stream_count": UNBOUNDED}}]}
MOST_CONNECTIONS = 50_000
HEADERS_KB = 16  # as the multiplexer has it: what it refuses for that, Envoy would send again and again
MOST_HEADERS = 1000  # more do not fit into HEADERS_KB
MICROSECONDS = 1_000_000


def bootstrap(lane: ExpressLane) -> Config:
    """The configuration that Envoy is started with; it follows CLUSTERS and ROUTES in the lane's folder."""
    follow_routes = {"rds": {"route_config_name": "grpc", "config_source": followed(lane, ROUTES)}}
    return process(lane) | {
        "dynamic_resources": {"cds_config": followed(lane, CLUSTERS)},
        "static_resources": {"listeners": listeners(lane, follow_routes)},
    }


def candidate(lane: ExpressLane, ports: Mapping[str, Sequence[int]]) -> Config:
    """The same with its tables in it, for `envoy --mode validate`, which does not look at the files."""
    inline = {key: value for key, value in routes(lane, list(ports)).items() if key != "@type"}
    typeless = [{key: value for key, value in each.items() if key != "@type"} for each in clusters(lane, ports)]
    return process(lane) | {
        "static_resources": {"listeners": listeners(lane, {"route_config": inline}), "clusters": typeless}
    }


def followed(lane: ExpressLane, name: str) -> Config:
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": f"{lane.folder}/{name}", "watched_directory": {"path": lane.folder}},
    }


def process(lane: ExpressLane) -> Config:
    heap = extension(
        "envoy.resource_monitors.fixed_heap",
        f"{EXTENSION}.resource_monitors.fixed_heap.v3.FixedHeapConfig",
        max_heap_size_bytes=lane.memory_bytes + OWN_BYTES,
    )
    connections = extension(
        "envoy.resource_monitors.global_downstream_max_connections",
        f"{EXTENSION}.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=MOST_CONNECTIONS,
    )
    full = {"name": "envoy.resource_monitors.fixed_heap", "threshold": {"value": 0.95}}
    buckets = [bucket * MICROSECONDS for bucket in lane.duration_buckets]
    return {
        "node": {"id": "express", "cluster": "express"},
        "admin": {"address": {"pipe": {"path": lane.admin_socket, "mode": 0o600}}},
        "overload_manager": {
            "refresh_interval": "0.25s",
            "resource_monitors": [heap, connections],
            "actions": [{"name": "envoy.overload_actions.stop_accepting_requests", "triggers": [full]}],
        },
        # A thread that hangs ends Envoy: its callers are better off with the multiplexer.
        "watchdogs": {which: {"kill_timeout": HANG_TIMEOUT} for which in ("main_thread_watchdog", "worker_watchdog")},
        "layered_runtime": RUNTIME,
        "stats_config": {
            "histogram_bucket_settings": [{"match": {"prefix": f"express.{DURATIONS}"}, "buckets": buckets}]
        },
    }


def listeners(lane: ExpressLane, route_source: Config) -> list[Config]:
    """For all callers, and for the gateway."""
    outside, inside = (
        connection_manager(lane, standing) | route_source for standing in (EXPRESS_JUDGE, EXPRESS_INSIDE)
    )
    chain: Config = {"filters": [http(outside)]}
    if lane.tls.on:
        chain["transport_socket"] = extension(
            "envoy.transport_sockets.tls",
            f"{EXTENSION}.transport_sockets.tls.v3.DownstreamTlsContext",
            **tls_context(lane),
        )
        chain["transport_socket_connect_timeout"] = "5s"
    return [
        {
            "name": "grpc",
            "address": {"socket_address": {"address": lane.host, "port_value": lane.port}},
            "enable_reuse_port": True,
            "filter_chains": [chain],
        },
        {
            "name": "inside",
            "address": {"pipe": {"path": lane.inside_socket, "mode": 0o600}},
            "filter_chains": [{"filters": [http(inside)]}],
        },
    ]


def http(manager: Config) -> Config:
    kind = f"{EXTENSION}.filters.network.http_connection_manager.v3.HttpConnectionManager"
    return extension("envoy.filters.network.http_connection_manager", kind, **manager)


def connection_manager(lane: ExpressLane, standing: str) -> Config:
    """standing: what the multiplexer and the script are told of its callers."""
    headers = f"{EXTENSION}.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    # Before anything else: a caller cannot say of himself that he was admitted.
    told = {
        "append": {
            "header": {"key": EXPRESS_KEY, "value": standing},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    }
    return {
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "max_request_headers_kb": HEADERS_KB,
        "common_http_protocol_options": {"max_headers_count": MOST_HEADERS},
        "http2_protocol_options": {"max_concurrent_streams": UNBOUNDED},
        "stream_idle_timeout": "0s",
        "stream_flush_timeout": f"{lane.timeout_secs}s",  # of an answer that is not read
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "use_remote_address": True,
        "skip_xff_append": True,
        "server_header_transformation": "PASS_THROUGH",
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"cert": True},
        "early_header_mutation_extensions": [
            extension("envoy.http.early_header_mutation.header_mutation", headers, mutations=[told])
        ],
        "http_filters": [
            extension(
                "envoy.filters.http.lua",
                f"{EXTENSION}.filters.http.lua.v3.Lua",
                default_source_code={"inline_string": f"{methods_in_lua()}\n{valid_in_lua(lane)}\n{lane.script}"},
            ),
            extension(
                "envoy.filters.http.router", f"{EXTENSION}.filters.http.router.v3.Router", suppress_envoy_headers=True
            ),
        ],
        "access_log": [measurements()],
        "local_reply_config": {"mappers": refusals(lane)},
    }


def refusals(lane: ExpressLane) -> list[Config]:
    """Envoy's own words, and what it found; a call without a deadline has the one that it has in the multiplexer."""
    timeout = f"Request timeout: no whole request, or no answer, within {lane.timeout_secs:.3g} s"
    too_large = f"The reply is larger than {largest_reply(lane)} bytes (grpc_max_message_size_mb)"
    nobody = "Neither a replica nor the multiplexer takes this call: see `appliance status`, and logs/express.log"
    return [
        refusal(503, "BACKEND_UNAVAILABLE", nobody),
        refusal(504, "TIMEOUT", timeout),
        refusal(408, "TIMEOUT", timeout),
        refusal(500, "TOO_LARGE", too_large, Code.RESOURCE_EXHAUSTED),
    ]


def refusal(status: int, code: str, words: str, grpc_status: Code | None = None) -> Config:
    """status: Envoy's, of HTTP; the caller gets gRPC's for it, or the one that is given."""
    headers = {CODE_KEY: code} | ({"grpc-status": str(int(grpc_status))} if grpc_status else {})
    only = {"op": "EQ", "value": {"default_value": status, "runtime_key": f"express.{status}"}}
    return {
        "filter": {"status_code_filter": {"comparison": only}},
        "headers_to_add": [{"header": {"key": key, "value": value}} for key, value in headers.items()],
        "body_format_override": {"text_format_source": {"inline_string": words}},
    }


def methods_in_lua() -> str:
    """The paths of `express_methods`: METHODS of the multiplexer's own, each with TEI's, and DIRECT of those."""
    pairs = ['["{}"]="{}"'.format(*paths(method)) for method in express_methods()]
    direct = [f'["{method.path}"]=true' for method in express_methods()]
    return f"local METHODS = {{{', '.join(pairs)}}}\nlocal DIRECT = {{{', '.join(direct)}}}"


def valid_in_lua(lane: ExpressLane) -> str:
    """VALID, the path of the file that says until when the tables are right; any path, so as bytes."""
    path = "".join(f"\\{byte:03}" for byte in lane.valid_file.encode())
    return f'local VALID, VALID_SECS = "{path}", {VALID_SECS}'


def measurements() -> Config:
    """Count and time the calls of the lane by method, instance and code, and by who answered."""
    tags = [
        {"name": "method", "value_format": "%REQ(:PATH)%"},
        {"name": "instance", "value_format": f"%REQ({INSTANCE_KEY})%"},
        {"name": DIRECT_KEY, "value_format": f"%UPSTREAM_METADATA(tei.express:{DIRECT_KEY})%"},
    ]
    coded = [*tags, {"name": "code", "value_format": "%GRPC_STATUS_NUMBER%"}]
    admitted = {"header_filter": {"header": exact(EXPRESS_KEY, EXPRESS_ADMITTED)}}
    return {
        "filter": admitted,
        **extension(
            "envoy.access_loggers.stats",
            f"{EXTENSION}.access_loggers.stats.v3.Config",
            stats_scope={"prefix": "express"},
            counters=[{"stat": {"name": CALLS, "tags": coded}, "value_fixed": 1}],
            histograms=[
                {
                    "stat": {"name": DURATIONS, "tags": tags},
                    "unit": "Microseconds",
                    "value_format": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
                }
            ],
        ),
    }


def tls_context(lane: ExpressLane) -> Config:
    """As `drivers.tls`: no session is resumed, because a resumed one is not looked at again."""
    versions = {"1.2": "TLSv1_2", "1.3": "TLSv1_3"}
    common: Config = {
        "alpn_protocols": ["h2"],
        "tls_params": {
            "tls_minimum_protocol_version": versions[lane.tls.min_version],
            "tls_maximum_protocol_version": "TLSv1_3",
        },
        "tls_certificate_sds_secret_configs": [followed_secret(lane, SERVER_SECRET)],
    }
    if lane.tls.require_client_cert:
        common["validation_context_sds_secret_config"] = followed_secret(lane, CLIENTS_SECRET)
    return {
        "common_tls_context": common,
        "require_client_certificate": lane.tls.require_client_cert,
        "disable_stateless_session_resumption": True,
        "disable_stateful_session_resumption": True,
    }


def followed_secret(lane: ExpressLane, name: str) -> Config:
    return {"name": name, "sds_config": followed(lane, secret_file(name))}


def secret_file(name: str) -> str:
    """One for each: Envoy (1.40) rejects a file with two secrets, and then resets every connection."""
    return f"{name}.json"


def secrets(lane: ExpressLane, turn: int) -> dict[str, Config]:
    """By the name of its file: the paths in `[tls]`, not what is in them.

    turn: another one each time that the files have changed. Envoy (1.40) keeps what it could not use; when the files
    are again what they were, it does not look, and then rejects each change of the other secret. It looks at a secret
    that is written differently: here the folder, whose changes make it read the files as well.
    """
    watched = {"path": lane.folder + "/." * (turn % 50)}
    server = {
        "certificate_chain": {"filename": lane.tls.cert_file},
        "private_key": {"filename": lane.tls.key_file},
        "watched_directory": watched,
    }
    clients = {"trusted_ca": {"filename": lane.tls.client_ca_file}, "watched_directory": watched}
    found: dict[str, Config] = {SERVER_SECRET: {"tls_certificate": server}}
    if lane.tls.require_client_cert:
        found[CLIENTS_SECRET] = {"validation_context": clients}
    kind = TYPE + "envoy.extensions.transport_sockets.tls.v3.Secret"
    return {secret_file(name): {"@type": kind, "name": name, **secret} for name, secret in found.items()}
