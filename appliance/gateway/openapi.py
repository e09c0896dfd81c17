"""The gateway described as OpenAPI 3.1: what `/openapi.json` and `/docs` show, and what the tests hold it to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from appliance import __version__
from appliance.core import access
from appliance.core.fields import Schema
from appliance.gateway.schemas import SCHEMAS, STRING, ref

JSON = "application/json"


class HttpOperation(NamedTuple):
    """A route in words. request, reply: the names of their schemas; None for what has no body."""

    method: str
    summary: str
    request: str | None
    reply: str | None


EXAMPLES: dict[str, Any] = {
    "EmbeddingsRequest": {"input": ["hello world", "bonjour"]},
    "PoolingRequest": {"input": ["hello world", "bonjour"]},
    "CohereRerankRequest": {"query": "capital of France", "documents": ["Paris", "Berlin"], "top_n": 1},
    "CohereEmbedRequest": {"texts": ["hello world"], "input_type": "search_query", "embedding_types": ["float"]},
    "ScoreRequest": {"text_1": "capital of France", "text_2": ["Paris", "Berlin"]},
    "OllamaEmbedRequest": {"model": "minilm", "input": ["hello world"]},
    "OllamaPrompt": {"model": "minilm", "prompt": "hello world"},
    "VertexRequest": {"instances": [{"inputs": "hello world"}]},
    "EmbedRequest": {"inputs": ["hello world", "bonjour"]},
    "EncodeRequest": {"inputs": "hello world"},
    "HybridRequest": {"inputs": "hello world", "dense": True},
    "SearchRerankRequest": {"query": "capital of France", "candidates": ["Paris", "Berlin"], "dense": True},
    "PredictRequest": {"inputs": "I like it"},
    "RerankRequest": {"query": "capital of France", "texts": ["Paris", "Berlin"]},
    "SimilarityRequest": {"inputs": {"source_sentence": "hello", "sentences": ["hi", "car"]}},
    "TokenizeRequest": {"inputs": "hello world"},
    "DecodeRequest": {"ids": [101, 7592, 2088, 102]},
}
ERRORS = {
    "OpenAIError": (400, 401, 403, 404, 405, 409, 413, 415, 429, 500, 503, 504),
    "CohereError": (400, 401, 403, 404, 405, 409, 413, 415, 429, 500, 503, 504),
    "OllamaError": (400, 401, 403, 404, 405, 409, 413, 415, 429, 500, 503, 504),
    "TEIError": (400, 401, 403, 404, 405, 409, 413, 415, 422, 424, 429, 500, 503, 504),
}
PLAIN = (400, 413, 415, 422)  # where TEI answers in plain text, too
OF_BODIES = (413, 415)  # refusals of a body


def document(operations: Iterable[tuple[str, HttpOperation, str]]) -> Schema:
    """operations: (path, what is there, the schema of its errors)."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tei-appliance gateway",
            "version": __version__,
            "description": "Every instance of the box over HTTP. The instance is chosen by the path prefix "
            "/instances/NAME, the header X-TEI-Instance or X-TEI-Model, the field model, or because it is the only one "
            "for the task, or the default.",
        },
        "paths": {path: {operation.method: described(operation, error)} for path, operation, error in operations},
        "components": {"schemas": SCHEMAS, "securitySchemes": access.SCHEMES},
        "security": [{}, *({name: []} for name in access.SCHEMES)],  # keys are asked for where there are any
    }


def described(operation: HttpOperation, error: str) -> Schema:
    responses: Schema = {"200": {"description": "Done"}}
    if operation.reply:
        responses["200"]["content"] = {JSON: {"schema": ref(operation.reply)}}
    for status in ERRORS[error]:
        if status in OF_BODIES and not operation.request:
            continue
        content = {JSON: {"schema": ref(error)}}
        if error == "TEIError" and status in PLAIN:
            content["text/plain"] = {"schema": STRING}
        responses[str(status)] = {"description": "Refused, with the reason", "content": content}
    description: Schema = {"summary": operation.summary, "responses": responses}
    if operation.request:
        content = {"schema": ref(operation.request), "example": EXAMPLES[operation.request]}
        description["requestBody"] = {"required": True, "content": {JSON: content}}
    return description
