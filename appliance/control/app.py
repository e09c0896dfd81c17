"""The Falcon application of the management API: the table of `routes` onto the verbs of `operations`."""

from __future__ import annotations

import falcon

from appliance.control import errors, models, routes
from appliance.control.middleware import ControlMiddleware
from appliance.node.authentication import Authenticator
from appliance.node.context import Node


def create_app(node: Node, authenticator: Authenticator) -> models.App:
    """A WSGI application for one appliance. Everything it answers with, errors included, is JSON."""
    paths = routes.router(node, authenticator)
    app = falcon.App(middleware=[ControlMiddleware(node, authenticator, paths)], router=paths)
    errors.install(app)
    return models.undecoded(app)
