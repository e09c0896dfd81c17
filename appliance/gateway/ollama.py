"""Ollama's dialect: `/api/embed`, `/api/embeddings`, `/api/tags` and the like. The tag `:latest` is ignored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import falcon

from appliance import __version__
from appliance.core import fields as check
from appliance.core.state import Instance
from appliance.drivers import modelfiles
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import EMBEDDING
from appliance.gateway.openai import ERROR_FORMS
from appliance.gateway.refusals import ErrorResponse, Refusal
from appliance.gateway.resource import Resource

LATEST = ":latest"


def render(refusal: Refusal) -> ErrorResponse:
    body = responses.dumps({"error": refusal.message})
    return ErrorResponse(ERROR_FORMS[refusal.reason].status, falcon.MEDIA_JSON, body)


def model_of(resource: Resource, body: dict[str, Any]) -> str:
    """The model that a request names, without `:latest` unless it is called so. Raises: Refusal."""
    model: str = shapes.bounded([shapes.need(body, "model", shapes.string).strip()], "model")[0]
    if model.endswith(LATEST) and not resource.gateway.selector.knows(model):
        model = model.removesuffix(LATEST) or model
    return model


def tagged(name: str) -> str:
    return name if ":" in name else name + LATEST


class OllamaEmbedResource(Resource):
    """Unit vectors of one or several texts."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        began = time.monotonic_ns()
        body = bodies.read_object(request, any_type=True)
        model = model_of(self, body)
        if body.get("input") in ([], ""):  # Ollama answers: nothing in, nothing out
            self.select(request, model, EMBEDDING)
            response.data = responses.dumps({"model": body["model"], "embeddings": []})
            return
        inputs = shapes.inputs(body, "input")
        truncate = shapes.get(body, "truncate", check.boolean, True)
        dimensions = shapes.get(body, "dimensions", shapes.DIMENSIONS)
        selection = self.select(request, model, EMBEDDING)
        calls = self.calls(request, selection, len(inputs))
        texts = calls.texts(inputs)
        blocks = calls.dense(texts, truncate=truncate, normalize=True, dimensions=dimensions)

        def pieces() -> Iterator[bytes]:
            yield b'{"model":' + responses.dumps(body["model"]) + b',"embeddings":'
            yield from responses.json_list(blocks, lambda _, row: row)
            told = {"total_duration": time.monotonic_ns() - began, "load_duration": 0}
            yield b"," + responses.dumps({**told, "prompt_eval_count": calls.usage.tokens})[1:]

        responses.send_json(request, response, calls.usage, pieces(), len(texts))


class OllamaEmbeddingsResource(Resource):
    """The older route: one text, and its vector as the model gives it."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request, any_type=True)
        model = model_of(self, body)
        texts = shapes.bounded([shapes.need(body, "prompt", shapes.string)], "prompt")
        selection = self.select(request, model, EMBEDDING)
        calls = self.calls(request, selection)
        ((vector,),) = calls.dense(texts, truncate=True, normalize=False)
        responses.send_json(request, response, calls.usage, iter([responses.dumps({"embedding": vector})]), 1)


class OllamaTagsResource(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        instances = self.gateway.selector.instances.values()
        names = [(each, name) for each in instances for name in (each.name, *each.spec.aliases)]
        response.data = responses.dumps({"models": [tag_of(self, instance, name) for instance, name in names]})


class OllamaShowResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request, any_type=True)
        instance = self.select(request, model_of(self, body if "model" in body else {"model": body.get("name")})).first
        embeds = self.gateway.selector.cards.fits(instance, EMBEDDING)
        tag = tag_of(self, instance, instance.name)
        capabilities = ["embedding"] if embeds else []
        response.data = responses.dumps({"details": tag["details"], "capabilities": capabilities, "model_info": {}})


def tag_of(resource: Resource, instance: Instance, name: str) -> dict[str, Any]:
    card = resource.gateway.selector.cards.of(instance)
    files = modelfiles.serving_files(card.folder) if card else []
    family = card.model_type if card else ""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": instance.created_at,
        "size": sum(file.size for file in files),
        "digest": "",
        "details": {"format": "safetensors", "family": family, "families": [family] if family else []},
    }


class OllamaVersionResource(Resource):
    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.data = responses.dumps({"version": __version__})
