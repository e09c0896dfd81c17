"""Cohere's dialect, with Jina's fields: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

import uuid
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.fields import shown
from appliance.gateway import answers, bodies, shapes
from appliance.gateway.openai import STATUS
from appliance.gateway.ranking import ranked
from appliance.gateway.refusals import Refusal
from appliance.gateway.resource import Resource


def render(refusal: Refusal) -> tuple[int, str, bytes]:
    """(status, content type, body) of an error: `message` is Cohere's, `detail` is Jina's."""
    body = {"id": str(uuid.uuid4()), "message": refusal.message, "detail": refusal.message}
    return STATUS[refusal.reason][0], falcon.MEDIA_JSON, answers.dumps(body)


class Rerank(Resource):
    """version: Cohere's, which decides whether documents come back by default: in neither, nor in Jina's."""

    def __init__(self, gateway: Any, version: str) -> None:
        super().__init__(gateway)
        self.version = version

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        model = shapes.get(body, "model", shapes.string)
        query = shapes.need(body, "query", shapes.string)
        rank_fields = shapes.get(body, "rank_fields", shapes.strings)
        given = shapes.need(body, "documents", documents)
        texts = shapes.bounded([text_of(entry, at, rank_fields) for at, entry in enumerate(given)], "documents")
        most = shapes.get(body, "top_n", shapes.TOP_N, len(texts))
        with_documents = shapes.get(body, "return_documents", check.boolean, False)
        choice = self.choose(request, model)
        embedder = self.embedder(request, choice)
        found = ranked(embedder, query, texts, truncate=choice.auto_truncate)
        results = [
            {"index": rank.index, "relevance_score": np.float32(rank.score)}
            | ({"document": document(given[rank.index])} if with_documents else {})
            for rank in found[:most]
        ]
        answer = {
            "id": str(uuid.uuid4()),
            "model": model or choice.model_id,
            "results": results,
            "meta": {"api_version": {"version": self.version}, "billed_units": {"search_units": 1}},
            "usage": {"prompt_tokens": embedder.spent.tokens, "total_tokens": embedder.spent.tokens},
        }
        answers.send(request, response, embedder.spent, iter([answers.dumps(answer)]), 1)


def documents(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings or objects, not {shown(value)}")
    return value


def text_of(entry: Any, at: int, rank_fields: list[str] | None) -> str:
    """A document's text: itself, its `rank_fields` a line each, or its `text`. Raises: Refusal that names it."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        fields = [key for key in rank_fields or ["text"] if key in entry]
        if fields and all(isinstance(entry[key], str) for key in fields):
            return "\n".join(f"{key}: {entry[key]}" for key in fields) if rank_fields else str(entry["text"])
    raise shapes.wrong_shape("documents", f"must hold strings, or objects with a text; entry {at} is neither")


def document(entry: Any) -> Any:
    return {"text": entry} if isinstance(entry, str) else entry
