"""TEI's routes of classifiers and rerankers: `/predict` and `/rerank`."""

from __future__ import annotations

from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import CLASSIFYING, MULTIVECTOR, RANKING
from appliance.gateway.cohere import CohereRerankResource
from appliance.gateway.ranking import rank_texts
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import encoding_options, model_of
from appliance.wire.tei.v1 import tei_pb2 as tei


class TeiPredictResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        inputs, single = shapes.pairs(body)
        raw = shapes.get(body, "raw_scores", check.boolean, False, null=False)
        selection = self.select(request, model_of(body), CLASSIFYING, RANKING)
        options = encoding_options(body, selection).pair_fields()
        for at, texts in enumerate(inputs):
            if not any(texts):
                raise Refusal(Reason.EMPTY, f"`inputs` cannot be empty (input {at})")
        calls = self.calls(request, selection)
        replies = calls.predictions(
            [tei.PredictPairRequest(inputs=texts, raw_scores=raw, **options) for texts in inputs]
        )
        rows = [
            [{"score": np.float32(one.score), "label": one.label} for one in reply.predictions] for reply in replies
        ]
        responses.send_json(request, response, calls.usage, iter([responses.dumps(rows[0] if single else rows)]), 1)


class TeiRerankResource(Resource):
    """With `documents` in the place of `texts` as Cohere's and infinity's clients send it, and answered to them."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        if shapes.is_given(body, "documents") and not shapes.is_given(body, "texts"):
            CohereRerankResource(self.gateway, version="1").respond(request, response, body)
            return
        query = shapes.need(body, "query", shapes.string)
        texts = shapes.need(body, "texts", shapes.strings)
        raw = shapes.get(body, "raw_scores", check.boolean, False, null=False)
        with_text = shapes.get(body, "return_text", check.boolean, False, null=False)
        selection = self.select(request, model_of(body), RANKING, MULTIVECTOR)
        options = encoding_options(body, selection).pair_fields()
        if not texts:
            raise Refusal(Reason.EMPTY, "`texts` cannot be empty")
        if len(texts) > shapes.MOST_TEXTS:
            raise Refusal(
                Reason.VALIDATION, f"batch size {len(texts)} > maximum allowed batch size {shapes.MOST_TEXTS}"
            )
        calls = self.calls(request, selection)
        ranks = [
            {"index": rank.index}
            | ({"text": texts[rank.index]} if with_text else {})
            | {"score": np.float32(rank.score)}
            for rank in rank_texts(calls, query, texts, raw_scores=raw, **options)
        ]
        responses.send_json(request, response, calls.usage, iter([responses.dumps(ranks)]), 1)
