"""TEI's routes for cloud platforms and probes: `/vertex` and `/metrics`; `/invocations` and `/ping` are `/` and
`/health` under other names."""

from __future__ import annotations

from pathlib import Path

import falcon

from appliance.core import fields as check
from appliance.drivers import metrics
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.client_watch import while_there
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import model_of
from appliance.gateway.tei_embedding import TeiSimilarityResource
from appliance.gateway.tei_root import Answering, is_similarity, of_model
from appliance.node.replica_metrics import ReplicaMetrics

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
objects = check.sequence_of(check.table, 10_000)


class TeiVertexResource(Resource):
    """Each of `instances` is the body of a request; the answers come in their order, or the first failure."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        parts = shapes.need(bodies.read_object(request), "instances", objects)
        kinds: dict[str, type[Answering]] = {}  # by instance: each is asked once what it does
        predictions: list[bytes] = []
        for part in while_there(request.env.get("gunicorn.socket"), parts):
            name = self.select(request, model_of(dict(part))).first.name
            answer = falcon.Response()
            if is_similarity(dict(part)):
                kind: type[Answering] = TeiSimilarityResource
            else:
                kind = kinds[name] = kinds.get(name) or of_model(self, request, dict(part))
            kind(self.gateway).respond(request, answer, dict(part))
            predictions.append(responses.whole(request, answer))
        response.content_type = falcon.MEDIA_JSON
        response.data = b'{"predictions":[' + b",".join(predictions) + b"]}"


class TeiMetricsResource(Resource):
    """TEI's own metrics of every replica, and what the multiplexer and the gateway of this machine have counted: where
    no control runs, nobody else tells it. Of one instance where the request names one, and TEI's alone."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        named = request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model")
        instances = self.select(request).instances if named else self.gateway.selector.instances.values()
        folder = Path(self.gateway.node.layout.metrics)
        with ReplicaMetrics(self.gateway.node).asked(instances) as of_replicas:
            counted = "" if named else metrics.merged(folder, self.gateway.selector.instances)
            response.text = counted + of_replicas()
        response.content_type = PLAIN
