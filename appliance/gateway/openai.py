"""OpenAI's dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.state import Instance
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import CLASSIFYING, EMBEDDING, MULTIVECTOR, OPENAI_PURPOSES, RANKING
from appliance.gateway.image_inputs import dense, mixed
from appliance.gateway.refusals import ErrorForm, ErrorResponse, Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import direction_value
from appliance.gateway.unmet_options import EMBED_DTYPE, NO_LATE_CHUNKING, ONE_VECTOR, cuts
from appliance.gateway.vector_formats import FORMAT, converted, refuse_unless_unit
from appliance.wire.quantization import CONVERSIONS, base64_of

ERROR_FORMS = {
    Reason.MALFORMED: ErrorForm(400, "invalid_request_error"),
    Reason.SHAPE: ErrorForm(400, "invalid_request_error"),
    Reason.MEDIA: ErrorForm(415, "invalid_request_error"),
    Reason.LARGE: ErrorForm(413, "invalid_request_error"),
    Reason.EMPTY: ErrorForm(400, "invalid_request_error"),
    Reason.VALIDATION: ErrorForm(400, "invalid_request_error"),
    Reason.TOKENIZER: ErrorForm(400, "invalid_request_error"),
    Reason.TOKEN_IDS: ErrorForm(400, "invalid_request_error"),
    Reason.BACKEND: ErrorForm(400, "invalid_request_error"),
    Reason.NOT_FOUND: ErrorForm(404, "invalid_request_error"),
    Reason.NOT_CACHED: ErrorForm(404, "invalid_request_error"),
    Reason.FINGERPRINT: ErrorForm(409, "invalid_request_error"),
    Reason.NO_PATH: ErrorForm(404, "invalid_request_error"),
    Reason.METHOD: ErrorForm(405, "invalid_request_error"),
    Reason.UNAUTHENTICATED: ErrorForm(401, "authentication_error"),
    Reason.FORBIDDEN: ErrorForm(403, "permission_error"),
    Reason.OVERLOADED: ErrorForm(429, "rate_limit_error"),
    Reason.UNAVAILABLE: ErrorForm(503, "server_error"),
    Reason.TIMEOUT: ErrorForm(504, "server_error"),
    Reason.INTERNAL: ErrorForm(500, "server_error"),
}
CODES = {
    Reason.NOT_FOUND: "model_not_found",
    Reason.OVERLOADED: "rate_limit_exceeded",
    Reason.UNAUTHENTICATED: "invalid_api_key",
}


def render(refusal: Refusal) -> ErrorResponse:
    form = ERROR_FORMS[refusal.reason]
    code = CODES.get(refusal.reason, str(refusal.reason))
    error = {"message": refusal.message, "type": form.error_type, "param": None, "code": code}
    body = {"error": error, "detail": refusal.message}  # `detail` is Jina's and Voyage's: their clients read only it
    return ErrorResponse(form.status, falcon.MEDIA_JSON, responses.dumps(body))


PURPOSE = check.one_of(*OPENAI_PURPOSES)
PURPOSE_FIELDS = ("input_type", "task")  # Voyage's and NVIDIA's, Jina's
TRUNCATION_FIELDS = ("truncation", "truncate")  # Voyage's; Jina's, and NVIDIA's with the end at which a text is cut
KIND_FIELDS = ("embedding_type", "encoding_type", "output_dtype")  # Jina's, LlamaIndex', Voyage's


@check.with_schema({"enum": [True, False, "NONE", "START", "END"]})
def truncation(value: Any) -> bool | str:
    if not isinstance(value, bool) and value not in ("NONE", "START", "END"):
        raise ValueError(f"must be true, false, NONE, START or END, not {check.shown(value)}")
    return value


def truncation_options(body: dict[str, Any], auto_truncate: bool) -> dict[str, Any]:
    """Of texts: what the request says of those that are too long; auto_truncate: what the instance does without."""
    cut = next((shapes.get(body, key, truncation) for key in TRUNCATION_FIELDS if shapes.is_given(body, key)), None)
    return {
        "truncate": auto_truncate if cut is None else cut not in (False, "NONE"),
        "truncation_direction": direction_value("left" if cut == "START" else "right"),
    }


class OpenAIEmbeddingsResource(Resource):
    """Also as Azure has it, with the model in the path; and with fields of Jina, Voyage, NVIDIA and vLLM."""

    def on_post(self, request: falcon.Request, response: falcon.Response, deployment: str | None = None) -> None:
        body = bodies.read_object(request)
        model = deployment or shapes.get(body, "model", shapes.string)
        inputs = mixed(body, "input")
        kind = next((shapes.get(body, key, FORMAT) for key in KIND_FIELDS if body.get(key)), "float")
        encoding = shapes.get(body, "encoding_format", shapes.ENCODING_FORMAT, "float")
        width = shapes.get(body, "output_dimension", shapes.DIMENSIONS)
        dimensions = shapes.get(body, "dimensions", shapes.UINT, width) or None  # infinity's client sends 0 for all
        shapes.get(body, "user", shapes.string)  # OpenAI's, checked and not used
        purpose = next((shapes.get(body, key, PURPOSE) for key in PURPOSE_FIELDS if shapes.is_given(body, key)), None)
        normalize = shapes.get(body, "normalized", check.boolean, shapes.get(body, "normalize", check.boolean, True))
        refuse_unless_unit(kind, normalize)
        shapes.get(body, "late_chunking", NO_LATE_CHUNKING)
        shapes.get(body, "return_multivector", ONE_VECTOR)
        shapes.get(body, "embed_dtype", EMBED_DTYPE)
        must_cut = cuts(body)
        prompt = shapes.get(body, "prompt_name", shapes.string)
        selection = self.select(request, model, EMBEDDING)
        calls = self.calls(request, selection, len(inputs))
        fetcher = self.refuse_text_model(selection, inputs)
        prompts = OPENAI_PURPOSES.get(purpose or "", ())
        options = {
            **truncation_options(body, selection.auto_truncate or must_cut),
            "prompt_name": prompt or self.gateway.selector.cards.prompt_name(selection.first, prompts),
        }
        blocks = dense(calls, inputs, fetcher, normalize, dimensions, **options)
        if kind in CONVERSIONS:  # now: what it cannot hold is refused before the answer begins
            blocks = [converted(block, kind) for block in blocks]
        in_base64 = "base64" in (kind, encoding)

        def entry(index: int, row: np.ndarray) -> dict[str, Any]:
            return {"object": "embedding", "index": index, "embedding": base64_of(row) if in_base64 else row}

        def pieces() -> Iterator[bytes]:
            yield b'{"object":"list","data":'
            yield from responses.json_list(blocks, entry)
            tokens = calls.usage.tokens
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            yield b',"model":' + responses.dumps(model or selection.model_id)
            yield b',"usage":' + responses.dumps(usage) + b"}"

        responses.send_json(request, response, calls.usage, pieces(), len(inputs))


class OpenAIModelsResource(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        instances = self.gateway.selector.instances
        if request.context.instance is not None:
            instances = {instance.name: instance for instance in self.select(request).instances}
        data = [model_object(each, name) for each in instances.values() for name in (each.name, *each.spec.aliases)]
        models = [{"name": each["id"], "endpoints": self.endpoints(instances, each)} for each in data]
        response.data = responses.dumps({"object": "list", "data": data, "models": models})  # Cohere reads `models`

    def endpoints(self, instances: dict[str, Instance], model: dict[str, Any]) -> list[str]:
        """Cohere's word for what the model does."""
        owner = next(each for each in instances.values() if model["id"] in (each.name, *each.spec.aliases))
        cards = self.gateway.selector.cards
        fitting = {"embed": EMBEDDING, "rerank": RANKING | MULTIVECTOR, "classify": CLASSIFYING}
        return [word for word, task in fitting.items() if cards.fits(owner, task)]


class OpenAIModelResource(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response, model: str) -> None:
        instance = self.select(request, model).first
        name = model if model in instance.spec.aliases else instance.name
        response.data = responses.dumps(model_object(instance, name))


def model_object(instance: Instance, name: str) -> dict[str, Any]:
    """`id` is the instance's name or an alias, `root` the id of its model; a request may name each."""
    created = int(datetime.fromisoformat(instance.created_at).timestamp())
    root = instance.spec.model_id
    return {"id": name, "name": name, "object": "model", "created": created, "owned_by": "tei-appliance", "root": root}
