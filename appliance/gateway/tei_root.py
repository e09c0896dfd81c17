"""TEI's `POST /`: the route that clients of a single model use. What the model does decides what is answered."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.gateway import bodies
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import model_of
from appliance.gateway.tei_embedding import TeiEmbedResource, TeiEmbedSparseResource, TeiSimilarityResource
from appliance.gateway.tei_info import TeiHealthResource, fetch_info
from appliance.gateway.tei_scoring import TeiPredictResource, TeiRerankResource
from appliance.wire.tei.v1 import tei_pb2 as tei

Answering = TeiEmbedResource | TeiEmbedSparseResource | TeiSimilarityResource | TeiPredictResource | TeiRerankResource
SCORING: dict[int, type[TeiPredictResource | TeiRerankResource]] = {
    tei.MODEL_TYPE_CLASSIFIER: TeiPredictResource,
    tei.MODEL_TYPE_RERANKER: TeiRerankResource,
}


class TeiRootResource(TeiHealthResource):
    """GET is health, as at `/health`."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        answering(self, request, body)(self.gateway).respond(request, response, body)


def answering(resource: Resource, request: falcon.Request, body: dict[str, Any]) -> type[Answering]:
    """The kind of resource for a request, and for what its model does."""
    return TeiSimilarityResource if is_similarity(body) else of_model(resource, request, body)


def is_similarity(body: dict[str, Any]) -> bool:
    """As huggingface_hub's client asks for them. An image is an object, too."""
    inputs = body.get("inputs")
    return isinstance(inputs, dict) and ("source_sentence" in inputs or "sentences" in inputs)


def of_model(resource: Resource, request: falcon.Request, body: dict[str, Any]) -> type[Answering]:
    selection = resource.select(request, model_of(body))
    info = fetch_info(resource, request, selection)
    embedding = TeiEmbedSparseResource if selection.first.spec.pooling == "splade" else TeiEmbedResource
    kind: type[Answering] = SCORING.get(info.model_type, embedding)
    return kind
