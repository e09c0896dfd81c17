"""Hosts and ports as people write them."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, NamedTuple

from appliance.core import fields as check

HOST = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")  # of browsers' extensions and apps, too
DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")  # which browsers leave out
URL_HOST = re.compile(r"[^/\s?#@\[\]]+")


def address(host: str, port: int) -> str:
    """host:port, with an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Address(NamedTuple):
    """Where a replica listens. host: an IP address without brackets, or a name."""

    host: str
    port: int

    def __str__(self) -> str:
        return address(self.host, self.port)


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@check.with_schema({"type": "string", "pattern": f"^({ORIGIN.pattern})$", "maxLength": 255})
def origin(value: Any) -> str:
    """Whose pages may call from a browser; it compares letter by letter with what the browser sends."""
    if isinstance(value, str) and len(value) <= 255 and ORIGIN.fullmatch(value) and not DEFAULT_PORT.fullmatch(value):
        return value
    raise ValueError(
        "must be an origin as browsers send it, such as https://app.example.com (small letters, no path, no slash at "
        f"the end), or *, not {check.shown(value)}"
    )


@check.with_schema({"type": "string", "pattern": f"^{URL_HOST.pattern}$", "maxLength": 255})
def url_host(value: Any) -> str:
    """Of URLs: a name or an address; with a port where that is not the one of http or https."""
    if isinstance(value, str) and len(value) <= 255 and URL_HOST.fullmatch(value):
        return value
    raise ValueError(f"must be a host, or host:port, without http:// and path, not {check.shown(value)}")


@check.with_schema({"type": "string", "pattern": "^.+:[0-9]{1,5}$"})
def host_and_port(value: Any) -> Address:
    """``host:port``; an IPv6 address in brackets."""
    text = value if isinstance(value, str) else ""
    host, colon, digits = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host, port = host[1:-1] if bracketed else host, check.decimal(digits) or 0
    valid = is_ip(host) if bracketed else ":" not in host and bool(HOST.fullmatch(host))
    if not (colon and valid and "%" not in host and 0 < port < 65536):
        raise ValueError(f'must be "host:port", an IPv6 address in brackets, not {check.shown(value)}')
    return Address(host, port)
