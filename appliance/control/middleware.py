"""The door of the management API: who comes in, and what he changed, written down."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.core import access
from appliance.core.access import Need
from appliance.node.authentication import ANONYMOUS, Authenticator
from appliance.node.context import Node

OWN_SOCKET = "control.sock"  # what comes through it has no address
READING = ("GET", "HEAD", "OPTIONS")


class ControlMiddleware:
    """Falcon middleware."""

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        self.node = node
        self.authenticator = authenticator

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        """Raises: Problem, before the path is even looked up."""
        request.context.who = ANONYMOUS
        need = access.rest_need(request.method, request.path, self.authenticator.settings.open_health)
        if need is not Need.OPEN:
            request.context.who = self.authenticator.http(Need.ANY, request.env)  # who it is, also where he may not
        request.context.who = self.authenticator.http(need, request.env)
        request.context.stranger = need is Need.OPEN and not self.authenticator.knows(request.env)

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        """One line of audit for each call that may change something, refused ones included."""
        if response.status_code == 401:
            response.set_header("WWW-Authenticate", "Bearer")
        if request.method not in READING:
            ring = self.node.turned_away if response.status_code == 401 else self.node.audit
            origin = request.remote_addr or OWN_SOCKET
            ring.record(
                f"{request.method} {request.path}"[:500],
                None,
                f"{request.context.who} from {origin}: {response.status_code}",
                who=request.context.who,
                origin=origin,
                status=response.status_code,
            )
