"""The Falcon application: routes of CONTRACT section 4 onto the verbs of `operations`."""

from __future__ import annotations

import falcon

from appliance.box import Appliance
from appliance.control import errors, keys, models, openapi, resources
from appliance.control.door import Door
from appliance.control.metrics import Metrics
from appliance.guard import Guard


def create_app(box: Appliance, guard: Guard) -> models.App:
    """A WSGI application for one appliance. Everything it answers with, errors included, is JSON."""
    app = falcon.App(middleware=[Door(box, guard)])
    errors.install(app)
    app.add_route("/health", resources.Health(box))
    app.add_route("/ready", resources.Ready(box))
    app.add_route("/instances", resources.Instances(box))
    app.add_route("/instances/{name}", resources.Instance(box))
    app.add_route("/instances/{name}/logs", resources.Logs(box))
    for verb in resources.VERBS:
        app.add_route(f"/instances/{{name}}/{verb}", resources.Verb(box, verb))
    app.add_route("/gpus", resources.Gpus(box))
    app.add_route("/metrics", Metrics(box))
    app.add_route("/openapi.json", openapi.Description())
    app.add_route("/events", resources.Events(box))
    app.add_route("/keys", keys.Keys(box, guard))
    app.add_route("/keys/{name}", keys.Key(box))
    app.add_route("/models", models.Models(box))
    app.add_route("/models/{model_id}", models.Model(box))
    app.add_route("/models/{model_id}/download", models.Download(box))
    app.add_route("/models/{model_id}/load", models.Load(box))
    app.add_route("/models/{model_id}/cancel", models.Cancel(box))
    app.add_route("/models/{model_id}/archive", models.Archive(box))
    app.add_route("/archives", models.Archives(box))
    return models.undecoded(app)
