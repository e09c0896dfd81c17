"""The express lane as values: what Envoy has to know of the appliance, and which calls are its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.core.settings import Settings
from appliance.core.tls_settings import TlsSettings
from appliance.wire.methods import METHODS, MULTIPLEXER, Method, Shape

Config = dict[str, Any]  # of Envoy, as JSON has it
TYPE = "type.googleapis.com/"
EXTENSION = "envoy.extensions"
VALID_SECS = 2  # that Envoy uses its tables for without their writer's word


@dataclass(frozen=True)
class ExpressLane:
    """What the listener needs to know. Paths are absolute; script: the text of lane.lua.

    duration_buckets: of the histogram of calls, in seconds.

    host: an IPv4 address. The multiplexer listens on the same port, on sockets of IPv6: the kernel prefers those of
    IPv4, so callers reach Envoy while it lives, and the multiplexer at the moment it dies.
    """

    host: str
    port: int
    folder: str
    admin_socket: str
    inside_socket: str
    valid_file: str  # what Envoy's script reads: until when the tables are right
    multiplexer_sockets: tuple[str, ...]
    script: str
    largest_message: int
    memory_bytes: int
    timeout_secs: int
    duration_buckets: tuple[float, ...]
    tls: TlsSettings

    @classmethod
    def of(
        cls, settings: Settings, host: str, cores: int, script: str, duration_buckets: tuple[float, ...]
    ) -> ExpressLane:
        layout = settings.layout
        return cls(
            host=host,
            port=settings.grpc_port,
            folder=layout.express,
            admin_socket=layout.express_socket,
            inside_socket=layout.express_inside_socket,
            valid_file=layout.express_valid,
            multiplexer_sockets=tuple(settings.multiplexer_sockets(cores)),
            script=script,
            largest_message=settings.grpc_max_message_bytes,
            memory_bytes=settings.memory_budget_bytes,
            timeout_secs=settings.grpc_request_timeout_secs,
            duration_buckets=duration_buckets,
            tls=settings.tls,
        )


def extension(name: str, kind: str, **values: Any) -> Config:
    """One extension of Envoy, configured. kind: its message."""
    return {"name": name, "typed_config": {"@type": TYPE + kind, **values}}


def exact(header: str, value: str) -> Config:
    return {"name": header, "string_match": {"exact": value}}


def express_methods() -> list[Method]:
    """The RPCs that go straight to a replica: single calls with a text."""
    return [method for method in METHODS if method.shape is Shape.UNARY and method.needs_request]


def paths(method: Method) -> tuple[str, str]:
    """Of an RPC: in the multiplexer's service, and in TEI's."""
    return f"/{MULTIPLEXER}/{method.name}", method.path
