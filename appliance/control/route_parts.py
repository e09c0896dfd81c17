"""The pieces of which the tables of routes are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from appliance.control.openapi import RestOperation
from appliance.core.access import Need
from appliance.core.fields import Schema, whole
from appliance.node.authentication import Authenticator
from appliance.node.context import Node

SWITCH: Schema = {"enum": ["true", "false"]}
INTEGER = whole(-(10**17), 10**17).schema
BODY = (400, 413, 415)  # refusals of whatever has a body
CHANGE = (503, 507)  # and of whatever changes something


class RestRoute(NamedTuple):
    """need: of all its methods, where it is not that of METHOD_NEEDS. operations: by method."""

    path: str
    resource: Callable[[Node, Authenticator], object]
    operations: Mapping[str, RestOperation]
    need: Need | None = None
