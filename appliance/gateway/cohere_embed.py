"""Cohere's `/v1/embed` and `/v2/embed`. An input type is the prompt of that purpose, where the model has one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.fields import Schema, shown
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import COHERE_PURPOSES, EMBEDDING
from appliance.gateway.image_inputs import dense, mixed
from appliance.gateway.refusals import Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import direction_value
from appliance.gateway.vector_formats import FORMAT, FORMATS

INPUT_TYPE = check.one_of(*COHERE_PURPOSES)
IMAGES_SCHEMA: Schema = shapes.TEXTS_SCHEMA | {
    "description": "instead of texts: each is base64, a data URL, or a URL of a host in image_url_hosts",
}
CONTENTS = ("texts", "images", "inputs")  # of which a request has one
PART_SCHEMA: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": shapes.TEXT_SCHEMA},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "image_url"},
                "image_url": {"type": "object", "properties": {"url": shapes.TEXT_SCHEMA}, "required": ["url"]},
            },
            "required": ["type", "image_url"],
        },
    ]
}
INPUTS_SCHEMA: Schema = {
    "description": "instead of texts: texts and images, each the only part of its content",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"content": {"type": "array", "items": PART_SCHEMA, "minItems": 1, "maxItems": 1}},
        "required": ["content"],
    },
    "minItems": 1,
    "maxItems": shapes.MOST_TEXTS,
}
TRUNCATE = check.one_of("NONE", "START", "END", "none", "start", "end")


EMBEDDING_TYPES = check.sequence_of(FORMAT, 64)


class CohereEmbedResource(Resource):
    """version: of Cohere's API, which the answer states."""

    def __init__(self, gateway: Any, version: str) -> None:
        super().__init__(gateway)
        self.version = version

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        model = shapes.get(body, "model", shapes.string)
        entries = entries_of(body)
        inputs = mixed({"inputs": shapes.bounded(entries, "texts")}, "inputs")
        kinds = shapes.get(body, "embedding_types", EMBEDDING_TYPES, ())
        purpose = shapes.get(body, "input_type", INPUT_TYPE)
        truncate = shapes.get(body, "truncate", TRUNCATE, "END").upper()
        dimensions = shapes.get(body, "output_dimension", shapes.DIMENSIONS)
        selection = self.select(request, model, EMBEDDING)
        self.refuse_shorter(selection, body, "max_tokens")
        prompt = self.gateway.selector.cards.prompt_name(selection.first, COHERE_PURPOSES.get(purpose, ()))
        calls = self.calls(request, selection, len(inputs))
        blocks = dense(
            calls,
            inputs,
            self.refuse_text_model(selection, inputs),
            True,
            dimensions,
            truncate=truncate != "NONE",
            truncation_direction=direction_value("left" if truncate == "START" else "right"),
            prompt_name=prompt,
        )
        texts = [entry for entry in entries if isinstance(entry, str)]
        by_type = bool(kinds) or self.version == "2"

        def pieces() -> Iterator[bytes]:
            yield b'{"id":' + responses.dumps(str(uuid.uuid4())) + b',"embeddings":'
            yield from vectors_by_type(blocks, kinds or ("float",)) if by_type else vectors_of("float", blocks)
            tokens = calls.usage.tokens
            meta = {"api_version": {"version": self.version}, "billed_units": {"input_tokens": tokens}}
            kind = "embeddings_by_type" if by_type else "embeddings_floats"
            yield b"," + responses.dumps({"texts": texts, "meta": meta, "response_type": kind})[1:]

        responses.send_json(request, response, calls.usage, pieces(), len(inputs))


def vectors_by_type(blocks: list[np.ndarray], kinds: tuple[str, ...]) -> Iterator[bytes]:
    for at, kind in enumerate(dict.fromkeys(kinds)):
        yield (b"," if at else b"{") + responses.dumps(kind) + b":"
        yield from vectors_of(kind, blocks)
    yield b"}"


def vectors_of(kind: str, blocks: list[np.ndarray]) -> Iterator[bytes]:
    return responses.json_list(blocks, lambda _, row: FORMATS[kind](row))


def entries_of(body: dict[str, Any]) -> list[Any]:
    """`texts`, or `images`, or what is in `inputs`, of which each has one part: texts, and images as `image_inputs`
    takes them. Raises: Refusal."""
    if len(given := [name for name in CONTENTS if shapes.is_given(body, name)]) > 1:
        raise shapes.wrong_shape(given[1], f"cannot stand beside `{given[0]}`: give one of {', '.join(CONTENTS)}")
    if given == ["images"]:
        return [{"image": image} for image in shapes.need(body, "images", shapes.strings)]
    if given != ["inputs"]:
        texts: list[Any] = shapes.need(body, "texts", shapes.strings)
        return texts
    return [
        entry_in(entry, at)
        for at, entry in enumerate(shapes.need(body, "inputs", check.sequence_of(check.table, shapes.MOST_TEXTS)))
    ]


def entry_in(entry: Any, at: int) -> Any:
    content = entry.get("content")
    parts = content if isinstance(content, list) else []
    if len(parts) == 1 and isinstance(parts[0], dict):
        if isinstance(parts[0].get("text"), str):
            return parts[0]["text"]
        image = parts[0].get("image_url")
        if isinstance(image, dict) and isinstance(image.get("url"), str):
            return {"image": image["url"]}
    raise refuse_input(at, content)


def refuse_input(at: int, content: Any) -> Refusal:
    return shapes.wrong_shape(
        "inputs", f"must hold one part of type text or image_url each; that of entry {at} is {shown(content)}"
    )
