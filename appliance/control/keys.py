"""The routes of API keys. The answer to POST is the only place where a key itself is ever told."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.control.resources import Resource, json_body, reply
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import keys

LISTENERS = ("bind", "api_port", "grpc_port", "http_port")


def told(node: Node, change: dict[str, Any]) -> dict[str, Any]:
    """With where it counts, for who wants to try it there."""
    return {**change, "listeners": {key: getattr(node.settings, key) for key in LISTENERS}}


class Keys(Resource):
    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        super().__init__(node)
        self.authenticator = authenticator

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, keys.listed(self.node))

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.authenticator.refuse_strangers(request.env)
        made = keys.create(self.node, json_body(request))
        response.cache_control = ["no-store"]
        response.location = f"/keys/{made['name']}"
        reply(response, told(self.node, made), 201)


class Key(Resource):
    def on_delete(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        reply(response, told(self.node, keys.revoke(self.node, name)))
