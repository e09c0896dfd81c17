"""A front for several appliances -> a file for nginx (1.22 or newer): its `upstream` and `server` blocks.

nginx (1.22) has these limits, which differ from what it would do by itself:

- It ends a call after a minute without a byte, and a connection after 1,000 calls; streams and channels live for hours.
- It refuses a body of more than 1 MB, and counts all messages of a stream as one body.
- It sends a POST to another appliance only if it is told that this may be repeated.
- It looks at nobody by itself: that an appliance is away, it learns from a call, which it makes again elsewhere.
- While it holds all of them for away, it refuses every call, though one may have come back since.
- An answer whose headers have more than 4 kB counts as none at all, and names in metadata have no dot.
- Each of its processes counts for itself, unless an upstream has a zone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from appliance.core.addresses import address
from appliance.core.front import AWAY_BODY, AWAY_WORDS, Front, is_address
from appliance.core.problems import invalid

GRPC, HTTP = "tei_appliance_grpc", "tei_appliance_http"  # the names of its `upstream` blocks
AWAY_SECS = 5  # that an appliance gets no call after it has not taken some
MOST_FAILS = 2  # within that time; one alone may be the call's own fault
AGAIN_SECS = 10  # within which a call is made again elsewhere
IDLE_SECS = 3600
IDLE_CONNECTIONS = 64  # to each appliance, kept by each process of nginx


def render(front: Front) -> str:
    """A file for the `http` block, such as /etc/nginx/conf.d/tei-appliance.conf. Raises: Problem invalid."""
    if is_address(front.boxes_name):
        raise invalid("nginx compares names only: --boxes-name must be a DNS name in the certificate of each appliance")
    blocks = [
        upstream(GRPC, [address(box.host, box.grpc_port) for box in front.boxes]),
        upstream(HTTP, [address(box.host, box.http_port) for box in front.boxes]),
        grpc_server(front),
        http_server(front),
    ]
    return "# Written by `appliance export nginx`, for nginx 1.22 or newer.\n" + "\n".join(blocks)


def upstream(name: str, addresses: Sequence[str]) -> str:
    """Each appliance is there twice: while all are held for away, they are asked all the same, as their own spare."""
    servers = [f"server {each} max_fails={MOST_FAILS} fail_timeout={AWAY_SECS}s;" for each in addresses]
    spare = [f"server {each} backup max_fails=0;" for each in addresses] if len(addresses) > 1 else []
    lines = [f"zone {name} 128k;", "least_conn;", *servers, *spare, f"keepalive {IDLE_CONNECTIONS};"]
    return block(f"upstream {name}", lines)


def grpc_server(front: Front) -> str:
    secure = "grpcs" if front.boxes_ca_file else "grpc"
    location = [
        f"grpc_pass {secure}://{GRPC};",
        *passing("grpc", front),
        "grpc_socket_keepalive on;",
        "grpc_buffer_size 64k;",
        # Of our own listeners alone is it believed; the name of a caller is that in his key.
        'grpc_set_header X-Forwarded-Client-Cert "";',
        "error_page 500 502 504 = @away;",
    ]
    away = [
        "default_type application/grpc;",
        "add_header grpc-status 14 always;",
        f'add_header grpc-message "{AWAY_WORDS}" always;',
        "return 200;",
    ]
    return block(
        "server",
        [
            f"listen {address(front.listen, front.grpc_port)}{' ssl' if front.own else ''} http2;",
            *own_tls(front),
            "client_max_body_size 0;",
            f"client_body_timeout {IDLE_SECS}s;",
            "http2_max_concurrent_streams 1024;",
            "large_client_header_buffers 4 16k;",
            "underscores_in_headers on;",
            "ignore_invalid_headers off;",
            *lasting(),
            block("location /", location).rstrip(),
            block("location @away", away).rstrip(),
        ],
    )


def http_server(front: Front) -> str:
    secure = "https" if front.boxes_ca_file else "http"
    location = [
        f"proxy_pass {secure}://{HTTP};",
        "proxy_http_version 1.1;",
        'proxy_set_header Connection "";',
        "proxy_set_header Host $host;",
        *passing("proxy", front),
        "proxy_buffering off;",
        "proxy_buffer_size 64k;",
        "proxy_buffers 4 64k;",
        'proxy_set_header X-Forwarded-Client-Cert "";',
        "error_page 502 504 = @away;",
    ]
    away = [
        "default_type application/json;",
        f"return 503 '{json.dumps(AWAY_BODY)}';",
    ]
    return block(
        "server",
        [
            f"listen {address(front.listen, front.http_port)}{' ssl http2' if front.own else ''};",
            *own_tls(front),
            "client_max_body_size 65m;",  # the gateway refuses what is over 64 MiB, in the words of its dialect
            *lasting(),
            block("location /", location).rstrip(),
            block("location @away", away).rstrip(),
        ],
    )


def passing(kind: str, front: Front) -> list[str]:
    """kind: of the module, grpc or proxy; their directives have the same names."""
    idle_secs = max(IDLE_SECS, front.timeout_secs)
    lines = [
        f"{kind}_connect_timeout 1s;",
        f"{kind}_read_timeout {idle_secs}s;",
        f"{kind}_send_timeout {idle_secs}s;",
        # What these ports compute may be computed twice.
        f"{kind}_next_upstream error timeout non_idempotent;",
        f"{kind}_next_upstream_timeout {AGAIN_SECS}s;",
    ]
    if front.boxes_ca_file:
        lines += [
            f"{kind}_ssl_verify on;",
            f"{kind}_ssl_trusted_certificate {front.boxes_ca_file};",
            f"{kind}_ssl_name {front.boxes_name};",
            f"{kind}_ssl_server_name on;",
            f"{kind}_ssl_protocols TLSv1.2 TLSv1.3;",
        ]
    if front.client:
        certificate, key = front.client
        lines += [f"{kind}_ssl_certificate {certificate};", f"{kind}_ssl_certificate_key {key};"]
    return lines


def own_tls(front: Front) -> list[str]:
    if not front.own:
        return []
    certificate, key = front.own
    asked = [f"ssl_client_certificate {front.client_ca_file};", "ssl_verify_client on;"] if front.client_ca_file else []
    return [
        f"ssl_certificate {certificate};",
        f"ssl_certificate_key {key};",
        "ssl_protocols TLSv1.2 TLSv1.3;",
        "ssl_session_tickets off;",
        *asked,
    ]


def lasting() -> list[str]:
    """Connections of callers end neither by their age nor by the number of their calls, and a reader may be slow."""
    return [
        f"keepalive_timeout {IDLE_SECS}s;",
        "keepalive_requests 1000000000;",
        "keepalive_time 365d;",
        f"send_timeout {IDLE_SECS}s;",
    ]


def block(name: str, lines: Iterable[str]) -> str:
    inner = "\n".join(lines).replace("\n", "\n    ")
    return f"{name} {{\n    {inner}\n}}\n"
