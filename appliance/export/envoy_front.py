"""A front for several appliances -> the configuration of an Envoy (1.40), which looks after them by itself.

Every two seconds it connects to each multiplexer and asks each gateway how it is. A call that an appliance did not
take, or that ended with it, goes to another one, as long as none of its answer has arrived.
"""

from __future__ import annotations

from typing import Any

from appliance.core.front import AWAY_BODY, AWAY_WORDS, Box, Front, is_address
from appliance.export.envoy import HEADERS_KB, MOST_HEADERS, RUNTIME
from appliance.export.envoy_tables import FRAME_BYTES, UNBOUNDED
from appliance.export.express_lane import EXTENSION, TYPE, Config, extension

GRPC, HTTP = "grpc", "http"
TRIES = 24  # besides the first, within some five seconds: a program that died is there again in a second or two
PROTOCOLS = f"{EXTENSION}.upstreams.http.v3.HttpProtocolOptions"


def bootstrap(front: Front) -> Config:
    """For `envoy --config-path`; Envoy reads JSON as well as YAML."""
    return {
        "node": {"id": "front", "cluster": "front"},
        "static_resources": {
            "listeners": [listener(front, GRPC, front.grpc_port), listener(front, HTTP, front.http_port)],
            "clusters": [cluster(front, GRPC), cluster(front, HTTP)],
        },
        "layered_runtime": RUNTIME,
    }


def listener(front: Front, name: str, port: int) -> Config:
    kind = f"{EXTENSION}.filters.network.http_connection_manager.v3.HttpConnectionManager"
    manager = extension("envoy.filters.network.http_connection_manager", kind, **connection_manager(front, name))
    chain: Config = {"filters": [manager]}
    if front.own:
        context = f"{EXTENSION}.transport_sockets.tls.v3.DownstreamTlsContext"
        chain["transport_socket"] = extension("envoy.transport_sockets.tls", context, **own_tls(front, name))
        chain["transport_socket_connect_timeout"] = "5s"
    return {"name": name, "address": socket_address(front.listen, port), "filter_chains": [chain]}


def connection_manager(front: Front, name: str) -> Config:
    router = f"{EXTENSION}.filters.http.router.v3.Router"
    return {
        "stat_prefix": name,
        "codec_type": "HTTP2" if name == GRPC else "AUTO",
        "max_request_headers_kb": HEADERS_KB,
        "common_http_protocol_options": {"max_headers_count": MOST_HEADERS, "idle_timeout": "3600s"},
        "http2_protocol_options": {"max_concurrent_streams": 1024},
        "stream_idle_timeout": "0s",
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "use_remote_address": True,
        "server_header_transformation": "PASS_THROUGH",
        "http_filters": [extension("envoy.filters.http.router", router, suppress_envoy_headers=True)],
        "local_reply_config": {"mappers": [refusal(name)]},
        "route_config": {"name": name, "virtual_hosts": [virtual_host(front, name)]},
    }


def virtual_host(front: Front, name: str) -> Config:
    others = f"{EXTENSION}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    # What these ports compute may be computed twice.
    tried = "connect-failure,refused-stream,reset"
    return {
        "name": name,
        "domains": ["*"],
        "request_body_buffer_limit": front.largest_message + FRAME_BYTES,
        "routes": [
            {
                "match": {"prefix": "/"},
                "route": {
                    "cluster": name,
                    "timeout": "0s",
                    **({"max_stream_duration": {"grpc_timeout_header_max": "0s"}} if name == GRPC else {}),
                    "retry_policy": {
                        "retry_on": f"{tried},unavailable" if name == GRPC else tried,
                        "num_retries": TRIES,
                        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.5s"},
                        "retry_host_predicate": [extension("envoy.retry_host_predicates.previous_hosts", others)],
                        "host_selection_retry_max_attempts": 5,
                    },
                },
            }
        ],
    }


def refusal(name: str) -> Config:
    """Envoy's own words, where no appliance answers; a caller of gRPC gets UNAVAILABLE with them."""
    told: Config = {"text_format_source": {"inline_string": AWAY_WORDS}}
    if name == HTTP:
        told = {"json_format": AWAY_BODY}
    only = {"op": "EQ", "value": {"default_value": 503, "runtime_key": "front.503"}}
    return {"filter": {"status_code_filter": {"comparison": only}}, "body_format_override": told}


def cluster(front: Front, name: str) -> Config:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), UNBOUNDED)
    named = not all(is_address(box.host) for box in front.boxes)
    endpoints = [{"endpoint": {"address": socket_address(box.host, port_of(box, name))}} for box in front.boxes]
    found: Config = {
        "name": name,
        "type": "STRICT_DNS" if named else "STATIC",
        "dns_lookup_family": "ALL",  # by default a name with both has an IPv6 address only
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [limits]},
        # With none that is well all are tried; the default begins with half of them, and then asks dead ones, too.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [health_check(name)],
        "typed_extension_protocol_options": {PROTOCOLS: {"@type": TYPE + PROTOCOLS, **protocol(name)}},
    }
    if front.boxes_ca_file:
        context = f"{EXTENSION}.transport_sockets.tls.v3.UpstreamTlsContext"
        found["transport_socket"] = extension("envoy.transport_sockets.tls", context, **boxes_tls(front, name))
    return found


def port_of(box: Box, name: str) -> int:
    return box.grpc_port if name == GRPC else box.http_port


def protocol(name: str) -> Config:
    if name == HTTP:
        return {"explicit_http_config": {"http_protocol_options": {}}}
    # A network that is cut sends no end of a connection.
    alive = {"interval": "5s", "timeout": "3s"}
    return {"explicit_http_config": {"http2_protocol_options": {"connection_keepalive": alive}}}


def health_check(name: str) -> Config:
    # Where keys are set a stranger may ask for nobody's health: gRPC's is left out, and a refusal is a sign of life.
    answers = {"path": "/health", "expected_statuses": [{"start": 200, "end": 500}]}
    asked: Config = {"tcp_health_check": {}} if name == GRPC else {"http_health_check": answers}
    return {
        "timeout": "2s",
        "interval": "2s",
        "no_traffic_interval": "2s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        **asked,
    }


def own_tls(front: Front, name: str) -> Config:
    assert front.own
    common = {"tls_certificates": [certificate(front.own)], **protocols(name)}
    if front.client_ca_file:
        common["validation_context"] = {"trusted_ca": {"filename": front.client_ca_file}}
    return {"common_tls_context": common, "require_client_certificate": bool(front.client_ca_file)}


def boxes_tls(front: Front, name: str) -> Config:
    kind = "IP_ADDRESS" if is_address(front.boxes_name) else "DNS"
    trusted = {
        "trusted_ca": {"filename": front.boxes_ca_file},
        "match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": front.boxes_name}}],
    }
    common = {
        "validation_context": trusted,
        **protocols(name),
        "alpn_protocols": ["h2" if name == GRPC else "http/1.1"],
    }
    if front.client:
        common["tls_certificates"] = [certificate(front.client)]
    return {"common_tls_context": common, **({} if kind == "IP_ADDRESS" else {"sni": front.boxes_name})}


def certificate(pair: tuple[str, str]) -> Config:
    return {"certificate_chain": {"filename": pair[0]}, "private_key": {"filename": pair[1]}}


def protocols(name: str) -> Config:
    return {
        "alpn_protocols": ["h2"] if name == GRPC else ["h2", "http/1.1"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"},
    }


def socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
