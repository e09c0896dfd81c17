"""The Falcon application of the management API: the table of `routes` onto the verbs of `operations`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import falcon

from appliance.control import errors, models, routes
from appliance.control.middleware import ControlMiddleware
from appliance.node.authentication import Authenticator
from appliance.node.context import Node


def create_app(node: Node, authenticator: Authenticator) -> models.App:
    """The WSGI application of one appliance."""
    return beside(rest_app(node, authenticator), LazyConsole(node, authenticator))


def rest_app(node: Node, authenticator: Authenticator) -> models.App:
    """Everything it answers with, errors included, is JSON."""
    paths = routes.router(node, authenticator)
    app = falcon.App(middleware=[ControlMiddleware(node, authenticator, paths)], router=paths)
    errors.install(app)
    return models.undecoded(app)


class LazyConsole:
    """The console, made when somebody looks at it: its templates take 8 MB."""

    def __init__(self, node: Node, authenticator: Authenticator) -> None:
        self.node = node
        self.authenticator = authenticator
        self.app: models.App | None = None
        self.making = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self.making:
            if self.app is None:
                from appliance.control.console.app import console_app

                self.app = console_app(self.node, self.authenticator)
        return self.app(environ, start_response)


def beside(rest: models.App, console: models.App) -> models.App:
    """One application of both. The console has what is below `/console`, and `/` for browsers."""

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        is_browser = environ["REQUEST_METHOD"] in ("GET", "HEAD") and "text/html" in environ.get("HTTP_ACCEPT", "")
        is_console = path == "/console" or path.startswith("/console/") or (path == "/" and is_browser)
        return (console if is_console else rest)(environ, start_response)

    return serve
