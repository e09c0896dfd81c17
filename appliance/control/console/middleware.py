"""Who comes in to the console: with a session that a key began, or without one where no key is asked for.

A request that changes something bears the token of its session. Without keys only this machine comes in, and only under
a name of this machine, so that no page of another site can speak for its user.
"""

from __future__ import annotations

import gzip
import re
import secrets
import time
from typing import Any

import falcon
from falcon.routing import CompiledRouter

from appliance.control.auditing import LOCAL_NAMES, audit, host_of
from appliance.control.console.needs import OPEN_PATHS, need_of
from appliance.core import access, sessions
from appliance.core.access import NOBODY, Principal
from appliance.core.problems import Kind, Problem, quoted
from appliance.drivers.secretfile import secret_in
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations.supervision import unwritable

STATIC = "/console/static/"
TOKEN_HEADER, TOKEN_FIELD = "X-CSRF-Token", "token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
LEAST_COMPRESSED, COMPRESSION = 2048, 4  # bytes; 1 to 9, of which 4 takes half the time of 9
LONGEST_FORM, LONGEST_KEY_FORM = 256 * 1024, 4096  # bytes


class ConsoleMiddleware:
    """Falcon middleware. ``paths``: the router of the console."""

    def __init__(self, node: Node, authenticator: Authenticator, paths: CompiledRouter) -> None:
        self.node = node
        self.authenticator = authenticator
        self.paths = paths

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        """Raises: Problem; falcon's redirection to the form for a key. Nothing of a stranger's body is read."""
        request.context.principal, request.context.token = NOBODY, ""
        if request.path.startswith(STATIC):
            return
        if request.path == "/":  # to which a browser sends no cookie
            raise falcon.HTTPSeeOther("/console")
        self.refuse_elsewhere(request)
        self.authenticator.refuse_certificate(request.env)
        try:
            secret = secret_in(self.node.layout.console_secret)
        except OSError as error:
            raise unwritable(self.node.layout.console_secret, error) from error
        principal, cookie = self.principal(request, secret)
        if cookie is None:
            cookie = sessions.cookie(sessions.begin(None, time.time(), secrets.token_hex(16)), secret)
            set_cookie(self.node, response, cookie, secret)
        request.context.principal, request.context.token = principal, sessions.form_token(cookie, secret)
        is_open = request.path in OPEN_PATHS
        if not is_open and principal.refusal and request.method == "GET" and not request.get_header("HX-Request"):
            raise falcon.HTTPSeeOther("/console/login")
        need = need_of(self.paths, request.method, request.path)
        if not is_open:
            access.authorize(principal, need)
        request.context.judge = lambda: access.authorize(self.principal(request, secret)[0], need)
        if request.method == "POST":
            if (request.content_length or 0) > (LONGEST_KEY_FORM if is_open else LONGEST_FORM):
                raise falcon.HTTPContentTooLarge(description="The form is too large")
            self.refuse_forged(request, cookie, secret)

    def principal(self, request: falcon.Request, secret: bytes) -> tuple[Principal, str | None]:
        """Who it is, and the cookie of their session, if that is a good one. A session stands for a key,
        and for nothing else that may be missing."""
        principal = self.authenticator.identify(request.env)
        cookie = next(iter(request.get_cookie_values(sessions.cookie_name(secret)) or []), None)
        session = sessions.read(cookie, secret, time.time()) if cookie else None
        if session is None:
            return principal, None
        if principal.refusal and session.key:
            key = sessions.holder(session, self.authenticator.keys.current().keys)
            return (Principal(key.name, key.role), cookie) if key else (principal, None)
        return principal, cookie

    def refuse_elsewhere(self, request: falcon.Request) -> None:
        """Raises: Problem where no key is asked for, and the caller is elsewhere, or names this machine otherwise."""
        if self.authenticator.on:
            return
        if request.remote_addr and not access.loopback(request.remote_addr):
            words = "Without keys the console is for this machine alone: make one (appliance keys create NAME admin)"
            raise Problem(Kind.FORBIDDEN, "FORBIDDEN", words)
        if (name := host_of(request)) not in (*LOCAL_NAMES, self.node.settings.bind):
            words = f"Without keys the console answers to the names of this machine alone, and not to {quoted(name)}"
            raise Problem(Kind.FORBIDDEN, "FORBIDDEN", words)

    def refuse_forged(self, request: falcon.Request, cookie: str, secret: bytes) -> None:
        """Raises: Problem for a form that does not come from a page of this session."""
        token = request.get_header(TOKEN_HEADER) or form(request).get(TOKEN_FIELD, "")
        if request.get_header("Sec-Fetch-Site", default="same-origin") not in ("same-origin", "none"):
            token = ""
        if not sessions.is_form_token(token, cookie, secret):
            words = "This form is of another session, or of an older one: load the page again, and send it once more"
            raise Problem(Kind.FORBIDDEN, "FORGED", words)

    def process_response(
        self, request: falcon.Request, response: falcon.Response, resource: Any, succeeded: bool
    ) -> None:
        """One line of audit for each change, refused ones included."""
        for name, value in HEADERS.items():
            response.set_header(name, value)
        if request.path.startswith(STATIC):
            return
        response.cache_control = ["no-store"]
        compress(request, response)
        if request.method == "POST" and getattr(resource, "changes", True):
            who = request.context.principal
            audit(self.node, request, response, who.name, is_stranger=who.refusal is not None)


def compress(request: falcon.Request, response: falcon.Response) -> None:
    """A table of a hundred instances is a twentieth of itself. A page that has words of its address beside the token of
    its forms is sent as it is: the size would tell, guess by guess, to who sends its reader there. No other site makes
    a browser send HX-Request."""
    is_harmless = not request.query_string or request.get_header("HX-Request") is not None
    takes = bool(GZIP.search(request.get_header("Accept-Encoding", default="")))
    if is_harmless and takes and response.text and len(response.text) >= LEAST_COMPRESSED:
        response.data, response.text = gzip.compress(response.text.encode(), COMPRESSION, mtime=0), None
        response.set_header("Content-Encoding", "gzip")
        response.append_header("Vary", "Accept-Encoding")


def set_cookie(node: Node, response: falcon.Response, cookie: str, secret: bytes) -> None:
    """Lax: a link from elsewhere finds the session; what changes something needs a token besides."""
    response.set_cookie(
        sessions.cookie_name(secret),
        cookie,
        max_age=sessions.LASTS_SECS,
        path="/console",
        secure=node.settings.tls.on,
        http_only=True,
        same_site="Lax",
    )


def form(request: falcon.Request) -> dict[str, str]:
    """The fields of a form, each once. Raises: Problem."""
    known: dict[str, str] | None = getattr(request.context, "form", None)
    if known is None:
        if request.content_length and (request.content_type or "").partition(";")[0].strip() != falcon.MEDIA_URLENCODED:
            raise falcon.HTTPUnsupportedMediaType(description="Send the fields of a form")
        sent = request.get_media(default_when_empty={}) if request.content_length else {}
        if not isinstance(sent, dict):
            raise Problem(Kind.INVALID, "VALIDATION_ERROR", "Send the fields of a form")
        known = {name: value[-1] if isinstance(value, list) else str(value) for name, value in sent.items()}
        request.context.form = known
    return known
