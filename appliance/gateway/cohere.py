"""Cohere's dialect, with Jina's and Voyage's fields: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

import uuid
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.fields import shown
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import MULTIVECTOR, RANKING
from appliance.gateway.openai import ERROR_FORMS, truncation_options
from appliance.gateway.ranking import rank_texts
from appliance.gateway.refusals import ErrorResponse, Refusal
from appliance.gateway.resource import Resource


def render(refusal: Refusal) -> ErrorResponse:
    """`message` is Cohere's field, `detail` is Jina's."""
    body = {"id": str(uuid.uuid4()), "message": refusal.message, "detail": refusal.message}
    return ErrorResponse(ERROR_FORMS[refusal.reason].status, falcon.MEDIA_JSON, responses.dumps(body))


class CohereRerankResource(Resource):
    """version: of Cohere's API, which the answer states."""

    def __init__(self, gateway: Any, version: str) -> None:
        super().__init__(gateway)
        self.version = version

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        model = shapes.get(body, "model", shapes.string)
        query = shapes.need(body, "query", shapes.string)
        rank_fields = shapes.get(body, "rank_fields", shapes.strings)
        documents = shapes.need(body, "documents", check_documents)
        texts = [text_of(document, at, rank_fields) for at, document in enumerate(documents)]
        shapes.bounded(texts, "documents")
        raw = shapes.get(body, "raw_scores", check.boolean, False)
        most = shapes.get(body, "top_n", shapes.TOP_N, shapes.get(body, "top_k", shapes.TOP_N, len(texts)))
        with_documents = shapes.get(body, "return_documents", check.boolean, False)
        shapes.get(body, "max_chunks_per_doc", shapes.ONE)
        selection = self.select(request, model, RANKING, MULTIVECTOR)
        self.refuse_shorter(selection, body, "max_tokens_per_doc")
        calls = self.calls(request, selection)
        ranks = rank_texts(calls, query, texts, raw_scores=raw, **truncation_options(body, selection.auto_truncate))
        results = [
            {"index": rank.index, "relevance_score": np.float32(rank.score)}
            | ({"document": document_object(documents[rank.index])} if with_documents else {})
            for rank in ranks[:most]
        ]
        answer = {
            "id": str(uuid.uuid4()),
            "model": model or selection.model_id,
            "results": results,
            "data": results,  # Voyage's
            "meta": {"api_version": {"version": self.version}, "billed_units": {"search_units": 1}},
            "usage": {"prompt_tokens": calls.usage.tokens, "total_tokens": calls.usage.tokens},
        }
        responses.send_json(request, response, calls.usage, iter([responses.dumps(answer)]), 1)


def check_documents(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings or objects, not {shown(value)}")
    return value


def text_of(document: Any, at: int, rank_fields: list[str] | None) -> str:
    """What is ranked: the string, the object's `rank_fields` with one line each, or its field `text`.

    Raises: Refusal that names the document by its number ``at``.
    """
    if isinstance(document, str):
        return document
    if isinstance(document, dict):
        fields = [key for key in rank_fields or ["text"] if key in document]
        if fields and all(isinstance(document[key], str) for key in fields):
            return "\n".join(f"{key}: {document[key]}" for key in fields) if rank_fields else str(document["text"])
    raise shapes.wrong_shape("documents", f"must hold strings, or objects with a text; entry {at} is neither")


def document_object(document: Any) -> Any:
    return {"text": document} if isinstance(document, str) else document
