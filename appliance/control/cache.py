"""`/cache` and `/compatibility`: what is cached, what of it shall be forgotten, and whose vectors go together."""

from __future__ import annotations

import falcon

from appliance.control.errors import known_parameters
from appliance.control.resources import NodeResource, reply
from appliance.core.problems import invalid
from appliance.node import cache_overview
from appliance.operations import cache


class CacheResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        reply(response, cache_overview.show(self.node).mapping())

    def on_delete(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "instance")
        name = request.get_param("instance")
        if name is None:
            deleted = cache.purge(self.node, "", 0, "all of it, as asked")
        else:
            fingerprint = cache_overview.require_fingerprint(self.node, name).digest
            deleted = cache.purge(self.node, fingerprint, 0, f'those of "{name}", as asked', name)
        reply(response, {"deleted": deleted})


class CompatibilityResource(NodeResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        known_parameters(request, "a", "b")
        one, other = request.get_param("a"), request.get_param("b")
        if not one or not other:
            raise invalid("Query parameters a and b are needed: the names of two instances")
        reply(response, cache_overview.compatibility(self.node, one, other))
