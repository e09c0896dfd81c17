"""A key in a form begins a session; the key itself is not kept."""

from __future__ import annotations

import secrets
import time

import falcon

from appliance.control.console.middleware import form, set_cookie
from appliance.control.console.rendering import answer
from appliance.control.console.resource import ConsoleResource, first_page
from appliance.core import access, sessions
from appliance.drivers.secretfile import secret_in


class LoginResource(ConsoleResource):
    changes = True  # a wrong key is written down

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        if request.context.principal.refusal is None:
            raise falcon.HTTPSeeOther(first_page(request))
        answer(response, "login.html", wrong="", **self.common(request, ""))

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        keys = self.authenticator.keys.current().keys
        key = access.holder(keys, form(request).get("key", "").strip())
        if key is None:
            wrong = "This key is not known. `appliance keys create NAME admin` on the machine itself makes one."
            answer(response, "login.html", status=401, wrong=wrong, **self.common(request, ""))
            return
        secret = secret_in(self.node.layout.console_secret)
        session = sessions.begin(key, time.time(), secrets.token_hex(16))
        set_cookie(self.node, response, sessions.cookie(session, secret), secret)
        request.context.principal = access.Principal(key.name, key.role)
        response.status = falcon.HTTP_303
        response.location = first_page(request)


class LogoutResource(ConsoleResource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        secret = secret_in(self.node.layout.console_secret)
        response.unset_cookie(sessions.cookie_name(secret), path="/console", same_site="Lax")
        response.status = falcon.HTTP_303
        response.location = "/console/login"
