"""Where requests come from, and one line of audit for each that may change something."""

from __future__ import annotations

import falcon

from appliance.node.context import Node

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
OWN_SOCKET = "control.sock"  # what comes through it has no address


def host_of(request: falcon.Request) -> str:
    """The name by which the caller calls this machine; empty for none that can be read."""
    try:
        return (request.host or "").strip("[]")
    except ValueError:
        return ""


def audit(node: Node, request: falcon.Request, response: falcon.Response, who: str, is_stranger: bool) -> None:
    """Refused ones included; those of strangers in a ring of their own, or they would push the others out."""
    ring = node.turned_away if is_stranger else node.audit
    origin = request.remote_addr or OWN_SOCKET
    ring.record(
        f"{request.method} {request.path}"[:500],
        None,
        f"{who} from {origin}: {response.status_code}",
        who=who,
        origin=origin,
        status=response.status_code,
    )
