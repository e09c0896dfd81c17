"""The routes of API keys. The answer to POST is the only place that ever shows a key itself."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.control.resources import NodeResource, json_body, reply
from appliance.node.context import Node
from appliance.operations import keys

LISTENERS = ("bind", "api_port", "grpc_port", "http_port")


def with_listeners(node: Node, change: dict[str, Any]) -> dict[str, Any]:
    """With where it counts, for a caller who wants to try it there."""
    tls = {"cert_file": node.settings.tls.cert_file, "require_client_cert": node.settings.tls.require_client_cert}
    return {**change, "listeners": {key: getattr(node.settings, key) for key in LISTENERS} | tls}


class KeysResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, keys.listed(self.node))

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.authenticator.refuse_remote(request.env)
        key = keys.create(self.node, json_body(request))
        response.cache_control = ["no-store"]
        response.location = f"/keys/{key['name']}"
        reply(response, with_listeners(self.node, key), 201)


class KeyResource(NodeResource):
    def on_delete(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        reply(response, with_listeners(self.node, keys.revoke(self.node, name)))
