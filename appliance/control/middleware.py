"""Who comes in to the management API, and what they changed, written down."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import falcon
from falcon.routing import CompiledRouter

from appliance.control.auditing import LOCAL_NAMES, audit, host_of
from appliance.control.routes import need_of
from appliance.core import access
from appliance.core.access import ANONYMOUS, Need
from appliance.core.problems import Kind, Problem
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

READING = ("GET", "HEAD", "OPTIONS")


class ControlMiddleware:
    """Falcon middleware. ``paths``: the router of the application."""

    def __init__(self, node: Node, authenticator: Authenticator, paths: CompiledRouter) -> None:
        self.node = node
        self.authenticator = authenticator
        self.paths = paths

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        """Raises: Problem, before the path is even looked up."""
        request.context.who = ANONYMOUS
        self.refuse_other_sites(request)
        principal = self.authenticator.identify(request.env)
        need = need_of(self.paths, request.method, request.path)
        is_open = access.effective(need, self.authenticator.settings.open_health) is Need.OPEN
        if not (is_open and principal.role):  # where it is open, no key is asked for, and none is written down
            request.context.who = principal.name
        request.context.stranger = is_open and principal.refusal is not None
        self.authenticator.authorize(principal, need)

    def refuse_other_sites(self, request: falcon.Request) -> None:
        """Raises: Problem where no key is asked for, and a browser would change something for a page of another site,
        or of one whose name leads here. A browser shows a certificate unasked, for any page."""
        site, origin = request.get_header("Sec-Fetch-Site"), request.get_header("Origin")
        is_asked = self.authenticator.keys.current().required
        if is_asked or request.method in READING or not (site or origin):
            return
        is_own = self.authenticator.on or host_of(request) in (*LOCAL_NAMES, self.node.settings.bind)
        if not is_own or site not in (None, "same-origin", "none") or (origin and not is_of(origin, request)):
            words = "Without keys no page of another site may change anything here: make keys, or ask with a program"
            raise Problem(Kind.FORBIDDEN, "FORBIDDEN", words)

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        """One line of audit for each call that may change something, refused ones included."""
        if response.status_code == 401:
            response.set_header("WWW-Authenticate", "Bearer")
        is_wake = request.uri_template == "/instances/{name}/wake"
        own_call = is_wake and not request.remote_addr  # a multiplexer's, for its callers
        if request.method not in READING and not own_call:
            audit(self.node, request, response, request.context.who, is_stranger=response.status_code == 401)


def is_of(origin: str, request: falcon.Request) -> bool:
    """Whether an origin is the one that the request goes to."""
    return urlsplit(origin).netloc == request.get_header("Host", default="")
