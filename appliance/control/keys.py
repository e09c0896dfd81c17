"""The routes of API keys. The answer to POST is the only place where a key itself is ever told."""

from __future__ import annotations

from typing import Any

import falcon

from appliance import keyring
from appliance.box import Appliance
from appliance.control.resources import Resource, json_body, reply
from appliance.guard import Guard

LISTENERS = ("bind", "api_port", "grpc_port", "http_port")


def told(box: Appliance, change: dict[str, Any]) -> dict[str, Any]:
    """With where it counts, for who wants to try it there."""
    return {**change, "listeners": {key: getattr(box.settings, key) for key in LISTENERS}}


class Keys(Resource):
    def __init__(self, box: Appliance, guard: Guard) -> None:
        super().__init__(box)
        self.guard = guard

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, keyring.listed(self.box))

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.guard.refuse_strangers(request.env)
        made = keyring.create(self.box, json_body(request))
        response.cache_control = ["no-store"]
        response.location = f"/keys/{made['name']}"
        reply(response, told(self.box, made), 201)


class Key(Resource):
    def on_delete(self, request: falcon.Request, response: falcon.Response, name: str) -> None:
        reply(response, told(self.box, keyring.revoke(self.box, name)))
