"""TEI's `POST /`: the route that clients of a single model use. What the model does decides what is answered."""

from __future__ import annotations

import falcon

from appliance.gateway import bodies
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import model_of
from appliance.gateway.tei_embedding import TeiEmbedResource, TeiEmbedSparseResource
from appliance.gateway.tei_info import fetch_info
from appliance.gateway.tei_scoring import TeiPredictResource, TeiRerankResource
from appliance.wire.tei.v1 import tei_pb2 as tei

SCORING: dict[int, type[TeiPredictResource | TeiRerankResource]] = {
    tei.MODEL_TYPE_CLASSIFIER: TeiPredictResource,
    tei.MODEL_TYPE_RERANKER: TeiRerankResource,
}


class TeiRootResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        selection = self.select(request, model_of(body))
        info = fetch_info(self, request, selection)
        embedding = TeiEmbedSparseResource if selection.first.spec.pooling == "splade" else TeiEmbedResource
        SCORING.get(info.model_type, embedding)(self.gateway).respond(request, response, body)
