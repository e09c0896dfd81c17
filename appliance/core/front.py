"""One address in front of several appliances, as a value: what nginx or Envoy has to know of it.

Each appliance behind it serves the same instances. Its calls compute and change nothing, so one that an appliance has
not answered may be made again at the next one; the port of the REST API, which changes things, is not behind it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from appliance.core.problems import invalid, quoted
from appliance.core.settings import Settings

AWAY_WORDS = "No appliance behind this address takes the call: see `appliance status` on each of them"
AWAY_BODY = {  # as the gateway says that something is unavailable
    "error": {"message": AWAY_WORDS, "type": "server_error", "param": None, "code": "unavailable"},
    "detail": AWAY_WORDS,
}
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
PATH = re.compile(r"/[\w/.+@=,:~-]*")


@dataclass(frozen=True)
class Box:
    """One appliance: where its multiplexer and its gateway listen."""

    host: str
    grpc_port: int
    http_port: int

    @classmethod
    def parse(cls, text: str, settings: Settings) -> Box:
        """``HOST``, ``HOST:GRPC_PORT`` or ``HOST:GRPC_PORT:HTTP_PORT``; an IPv6 address in brackets. The ports that are
        left out are our own. Raises: Problem invalid."""
        found = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)((?::\d{1,5}){0,2})", text)
        if not found:
            raise invalid(
                f"{quoted(text)} is no HOST, HOST:GRPC_PORT or HOST:GRPC_PORT:HTTP_PORT ([::1]:9001 for IPv6)"
            )
        ports = [int(each) for each in found[2].split(":") if each]
        grpc_port, http_port = (*ports, *(settings.grpc_port, settings.http_port)[len(ports) :])
        for port in (grpc_port, http_port):
            checked_port(port)
        return cls(checked_host(found[1].strip("[]")), grpc_port, http_port)


@dataclass(frozen=True)
class Front:
    """Where it listens, and what is behind it. Paths are absolute; empty: without.

    own: the certificate that it shows, with its key; client_ca_file: whose certificates it asks callers for.
    boxes_ca_file: whose certificates the appliances show, each with boxes_name in it; client: the one that it shows to
    them, with its key.
    """

    boxes: tuple[Box, ...]
    listen: str
    grpc_port: int
    http_port: int
    largest_message: int
    timeout_secs: int
    own: tuple[str, str] | None = None
    client_ca_file: str = ""
    boxes_ca_file: str = ""
    boxes_name: str = ""
    client: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises: Problem invalid."""
        if not self.boxes:
            raise invalid("Name the appliances behind it: appliance export nginx HOST HOST")
        if len(set(self.boxes)) < len(self.boxes):
            raise invalid("An appliance is named twice: each is asked as often as another")
        if self.client_ca_file and not self.own:
            raise invalid("--client-ca asks callers for certificates, which needs TLS: set --cert and --key, too")
        if bool(self.boxes_ca_file) != bool(self.boxes_name):
            raise invalid(
                "--boxes-ca and --boxes-name belong together: the name is in the certificate of every appliance"
            )
        if self.client and not self.boxes_ca_file:
            raise invalid("--client-cert is shown to appliances with TLS: set --boxes-ca and --boxes-name, too")
        for path in (*(self.own or ()), *(self.client or ()), self.client_ca_file, self.boxes_ca_file):
            checked_path(path)
        if self.grpc_port == self.http_port:
            raise invalid(f"It needs two ports, one for gRPC and one for HTTP: both are {self.grpc_port}")
        for port in (self.grpc_port, self.http_port):
            checked_port(port)
        if not is_address(checked_host(self.listen)):
            raise invalid(f"{quoted(self.listen)} must be an IP address of the front's machine, or 0.0.0.0 for all")
        if self.boxes_name:
            checked_host(self.boxes_name)


def pair_of(certificate: str, key: str, flags: str) -> tuple[str, str] | None:
    """Raises: Problem invalid for half of it."""
    if bool(certificate) != bool(key):
        raise invalid(f"{flags} belong together: set both, or neither")
    return (certificate, key) if certificate else None


def checked_host(host: str) -> str:
    """Raises: Problem invalid for what is neither an address nor a name: it goes into a configuration as it is."""
    try:
        if "%" not in host:  # a zone may have any characters
            return str(ipaddress.ip_address(host))
        raise ValueError
    except ValueError:
        if HOST.fullmatch(host):
            return host
        raise invalid(f"{quoted(host)} is no IP address and no name of a host") from None


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def checked_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise invalid(f"{port} is no port: they go from 1 to 65535")


def checked_path(path: str) -> None:
    """Raises: Problem invalid for a path that has to be quoted differently in each program."""
    if path and not PATH.fullmatch(path):
        raise invalid(f"{quoted(path)} must be an absolute path of letters, digits and /.+@=,:~-_")
