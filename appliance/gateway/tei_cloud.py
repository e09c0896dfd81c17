"""TEI's routes for cloud platforms and probes: `/vertex` and `/metrics`; `/invocations` and `/ping` are `/` and
`/health` under other names."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.core import fields as check
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.resource import Resource
from appliance.gateway.tei_root import answering
from appliance.node import replica_metrics

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
objects = check.sequence_of(check.table, 10_000)


class TeiVertexResource(Resource):
    """Each of `instances` is the body of a request; the answers come in their order, or the first failure."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        parts = shapes.need(bodies.read_object(request), "instances", objects)
        predictions: list[Any] = []
        for part in parts:
            answer = falcon.Response()
            answering(self, request, dict(part)).respond(request, answer, dict(part))
            predictions.append(responses.parsed(answer))
        response.data = responses.dumps({"predictions": predictions})


class TeiMetricsResource(Resource):
    """TEI's own metrics of every replica, or of those of the instance that the request names."""

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        named = request.context.instance or request.get_header("X-TEI-Instance") or request.get_header("X-TEI-Model")
        instances = self.select(request).instances if named else self.gateway.selector.instances.values()
        response.content_type = PLAIN
        response.text = replica_metrics.page(self.gateway.node, instances)
