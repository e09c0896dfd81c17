"""The Falcon application: routes of CONTRACT section 4 onto the verbs of `operations`."""

from __future__ import annotations

import falcon

from appliance.control import errors, keys, models, openapi, resources
from appliance.control.metrics import Metrics
from appliance.control.middleware import ControlMiddleware
from appliance.node.authentication import Authenticator
from appliance.node.context import Node


def create_app(node: Node, authenticator: Authenticator) -> models.App:
    """A WSGI application for one appliance. Everything it answers with, errors included, is JSON."""
    app = falcon.App(middleware=[ControlMiddleware(node, authenticator)])
    errors.install(app)
    app.add_route("/health", resources.Health(node))
    app.add_route("/ready", resources.Ready(node))
    app.add_route("/instances", resources.Instances(node))
    app.add_route("/instances/{name}", resources.Instance(node))
    app.add_route("/instances/{name}/logs", resources.Logs(node))
    for verb in resources.VERBS:
        app.add_route(f"/instances/{{name}}/{verb}", resources.Verb(node, verb))
    app.add_route("/gpus", resources.Gpus(node))
    app.add_route("/metrics", Metrics(node))
    app.add_route("/openapi.json", openapi.Description())
    app.add_route("/events", resources.Events(node))
    app.add_route("/keys", keys.Keys(node, authenticator))
    app.add_route("/keys/{name}", keys.Key(node))
    app.add_route("/models", models.Models(node))
    app.add_route("/models/{model_id}", models.Model(node))
    app.add_route("/models/{model_id}/download", models.Download(node))
    app.add_route("/models/{model_id}/load", models.Load(node))
    app.add_route("/models/{model_id}/cancel", models.Cancel(node))
    app.add_route("/models/{model_id}/archive", models.Archive(node))
    app.add_route("/archives", models.Archives(node))
    return models.undecoded(app)
