"""How a request names its target: in the message (`TeiMultiplexer`), or in the metadata (`tei.v1` as it is)."""

from __future__ import annotations

from typing import Protocol

import grpc

from appliance.core.problems import invalid
from appliance.core.routing import Table, Target, missing_target
from appliance.node.directory import Directory
from appliance.wire.envelope import INSTANCE_KEY, MODEL_KEY, target_from_metadata, unwrap
from appliance.wire.methods import Method


class Addressing(Protocol):
    """Reads messages. Raises: Problem invalid."""

    def first(self, method: Method, raw: bytes, context: grpc.ServicerContext) -> tuple[Target, bytes]:
        """The target of a call, and TEI's own request in its first message."""

    def following(self, raw: bytes, target: Target, number: int) -> bytes:
        """TEI's own request in message ``number`` of a stream to ``target``."""


class Wrapped:
    """Every message carries the target beside TEI's own request."""

    def first(self, method: Method, raw: bytes, context: grpc.ServicerContext) -> tuple[Target, bytes]:
        target, inner = unwrap(raw)
        if target is None:
            raise missing_target()
        if inner is None and method.needs_request:
            raise invalid(f"Missing {method.snake_name} request: set the field request")
        return target, inner or b""

    def following(self, raw: bytes, target: Target, number: int) -> bytes:
        other, inner = unwrap(raw)
        if other is not None and other != target:
            raise invalid(
                f"Message {number} of the stream asks for {other}, but the first one asked for {target}: "
                "one stream has one target"
            )
        if inner is None:
            raise invalid(f"Message {number} of the stream has no request")
        return inner


class ByMetadata:
    """An unmodified TEI client: its messages are TEI's own, the target is in the metadata of the call."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    def first(self, method: Method, raw: bytes, context: grpc.ServicerContext) -> tuple[Target, bytes]:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        return target_from_metadata(metadata) or only_instance(self.directory.table), raw

    def following(self, raw: bytes, target: Target, number: int) -> bytes:
        return raw


def only_instance(table: Table) -> Target:
    """Raises: Problem invalid unless there is one instance, or one default."""
    routes = table.routes if len(table.routes) == 1 else [route for route in table.routes if route.default]
    if len(routes) != 1:
        raise invalid(f"Say which instance with metadata {INSTANCE_KEY} or {MODEL_KEY}{table.listed}")
    return Target(instance_name=routes[0].name)
