"""OpenAI's dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import falcon
import numpy as np

from appliance.core.state import Instance
from appliance.gateway import answers, bodies, shapes
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource

STATUS = {
    Reason.MALFORMED: (400, "invalid_request_error"),
    Reason.SHAPE: (400, "invalid_request_error"),
    Reason.MEDIA: (415, "invalid_request_error"),
    Reason.LARGE: (413, "invalid_request_error"),
    Reason.EMPTY: (400, "invalid_request_error"),
    Reason.VALIDATION: (400, "invalid_request_error"),
    Reason.TOKENIZER: (400, "invalid_request_error"),
    Reason.TOKEN_IDS: (400, "invalid_request_error"),
    Reason.BACKEND: (400, "invalid_request_error"),
    Reason.NOT_FOUND: (404, "invalid_request_error"),
    Reason.NO_PATH: (404, "invalid_request_error"),
    Reason.METHOD: (405, "invalid_request_error"),
    Reason.UNAUTHENTICATED: (401, "authentication_error"),
    Reason.FORBIDDEN: (403, "permission_error"),
    Reason.OVERLOADED: (429, "rate_limit_error"),
    Reason.UNAVAILABLE: (503, "server_error"),
    Reason.TIMEOUT: (504, "server_error"),
    Reason.INTERNAL: (500, "server_error"),
}
CODES = {
    Reason.NOT_FOUND: "model_not_found",
    Reason.OVERLOADED: "rate_limit_exceeded",
    Reason.UNAUTHENTICATED: "invalid_api_key",
}


def render(refusal: Refusal) -> tuple[int, str, bytes]:
    """(status, content type, body) of an error."""
    status, kind = STATUS[refusal.reason]
    code = CODES.get(refusal.reason, str(refusal.reason))
    error = {"message": refusal.message, "type": kind, "param": None, "code": code}
    return status, falcon.MEDIA_JSON, answers.dumps({"error": error})


class Embeddings(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        model = shapes.get(body, "model", shapes.string)
        given = shapes.inputs(body, "input")
        encoding = shapes.get(body, "encoding_format", shapes.ENCODING_FORMAT, "float")
        dimensions = shapes.get(body, "dimensions", shapes.DIMENSIONS)
        shapes.get(body, "user", shapes.string)  # OpenAI's own; nothing is done with it
        choice = self.choose(request, model)
        embedder = self.embedder(request, choice, len(given))
        texts = embedder.texts(given)
        found = embedder.dense(texts, truncate=choice.auto_truncate, normalize=True, dimensions=dimensions)

        def entry(index: int, row: np.ndarray) -> dict[str, Any]:
            vector = answers.base64_of(row) if encoding == "base64" else row
            return {"object": "embedding", "index": index, "embedding": vector}

        def pieces() -> Iterator[bytes]:
            yield b'{"object":"list","data":'
            yield from answers.listed(found, entry)
            tokens = embedder.spent.tokens
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            yield b',"model":' + answers.dumps(model or choice.model_id) + b',"usage":' + answers.dumps(usage) + b"}"

        answers.send(request, response, embedder.spent, pieces(), len(texts))


class Models(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        instances = self.gateway.chooser.instances
        if request.context.instance is not None:
            instances = {instance.name: instance for instance in self.choose(request).instances}
        response.data = answers.dumps({"object": "list", "data": [card(found) for found in instances.values()]})

    on_head = on_get


class Model(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response, model: str) -> None:
        response.data = answers.dumps(card(self.choose(request, model).first))

    on_head = on_get


def card(instance: Instance) -> dict[str, Any]:
    """`id` is the instance's name, `root` the model that it serves; both may be asked for."""
    created = int(datetime.fromisoformat(instance.created_at).timestamp())
    root = instance.spec.model_id
    return {"id": instance.name, "object": "model", "created": created, "owned_by": "tei-appliance", "root": root}
