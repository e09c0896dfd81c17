"""One line of audit for each request that may change something."""

from __future__ import annotations

import falcon

from appliance.node.context import Node

OWN_SOCKET = "control.sock"  # what comes through it has no address


def audit(node: Node, request: falcon.Request, response: falcon.Response, who: str) -> None:
    """Refused ones included; those of strangers in a ring of their own."""
    ring = node.turned_away if response.status_code == 401 else node.audit
    origin = request.remote_addr or OWN_SOCKET
    ring.record(
        f"{request.method} {request.path}"[:500],
        None,
        f"{who} from {origin}: {response.status_code}",
        who=who,
        origin=origin,
        status=response.status_code,
    )
