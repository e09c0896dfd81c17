"""API keys, for admins: made once, shown once, revoked."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.control.console.actions import go_to
from appliance.control.console.middleware import form
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource
from appliance.core.access import ROLES
from appliance.operations import keys


class KeysPage(ConsoleResource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        values: dict[str, Any] = {"keys": keys.listed(self.node), "roles": ROLES, "on": self.authenticator.on}
        answer(response, "keys.html", **values, **self.common(request, "keys"))


class CreateKey(ConsoleResource):
    """The answer is the only place that ever shows the key."""

    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.authenticator.refuse_remote(request.env)
        sent = form(request)
        key = keys.create(self.node, {"name": sent.get("name", ""), "role": sent.get("role", "")})
        answer(response, "new_key.html", key=key)


class RevokeKey(ConsoleResource):
    changes = True

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        keys.revoke(self.node, form(request).get("name", ""))
        go_to(response, "/console/keys")
