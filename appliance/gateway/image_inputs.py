"""Images among the inputs of a request, as TEI-like, OpenAI-like and Jina's clients write them.

`{"type": "image", "data": …}`, `{"type": "image", "url": …}` and `{"image": …}` are images: base64, a data URL, or a
URL of a host that is allowed; `{"type": "text", "value": …}` and `{"text": …}` are texts.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from appliance.core import fields as check
from appliance.core.fields import Schema, shown
from appliance.core.preprocessing import LARGEST_IMAGE
from appliance.core.problems import Problem
from appliance.drivers.imagefetch import ImageFetcher
from appliance.gateway import multiplexer_replies, shapes
from appliance.gateway.multiplexer_calls import MultiplexerCalls
from appliance.gateway.multiplexer_replies import DenseVectors
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.shapes import Input
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_appliance.v1.images_pb2 import EmbedImageRequest
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

MOST_IMAGES = 1000
MOST_BYTES = 64 * 1024 * 1024  # of all images of a request
FILLED: Schema = {"type": "string", "minLength": 1}
CONTENT_SCHEMA: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"image": FILLED}, "required": ["image"]},
        {
            "type": "object",
            "properties": {"type": {"const": "image"}, "data": FILLED, "url": FILLED},
            "required": ["type"],
        },
        {"type": "object", "properties": {"text": FILLED}, "required": ["text"]},
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "value": FILLED},
            "required": ["type", "value"],
        },
    ]
}
MIXED_SCHEMA: Schema = {
    "anyOf": [
        *shapes.INPUTS_SCHEMA["anyOf"],
        CONTENT_SCHEMA,
        {
            "type": "array",
            "items": {"anyOf": [shapes.TEXT_SCHEMA, CONTENT_SCHEMA]},
            "minItems": 1,
            "maxItems": shapes.MOST_TEXTS,
        },
    ]
}
WEB = ("http://", "https://")
MODALITY = check.one_of("text", "image")  # infinity's: what the strings are


class MixedInputs(NamedTuple):
    """Texts (or ids of their tokens) and images, each with its place in the request. An image is base64, a data URL or
    a URL."""

    texts: dict[int, Input]
    images: dict[int, str]

    def __len__(self) -> int:
        return len(self.texts) + len(self.images)


def mixed(body: dict[str, Any], key: str) -> MixedInputs:
    """What stands under a key of a body. Raises: Refusal."""
    value = body.get(key)
    entries = value if isinstance(value, list) else [value]
    if shapes.get(body, "modality", MODALITY, "text") == "image":
        entries = [{"image": entry} if isinstance(entry, str) else entry for entry in entries]
    if not any(isinstance(entry, dict) for entry in entries):
        return MixedInputs(dict(enumerate(shapes.inputs(body, key))), {})
    if len(entries) > shapes.MOST_TEXTS:
        raise Refusal(Reason.VALIDATION, f"batch size {len(entries)} > maximum allowed batch size {shapes.MOST_TEXTS}")
    found = MixedInputs({}, {})
    for at, entry in enumerate(entries):
        if (source := image_source(entry, key)) is not None:
            found.images[at] = source
        else:
            found.texts[at] = text_of(entry, key, at)
    if len(found.images) > MOST_IMAGES:
        raise Refusal(Reason.VALIDATION, f"{len(found.images)} images > maximum of {MOST_IMAGES} in one request")
    return found


def image_source(entry: Any, key: str) -> str | None:
    """Base64, a data URL or a URL; None for what is no image. Raises: Refusal for an image without any."""
    if not isinstance(entry, dict) or not (entry.get("type") == "image" or "image" in entry):
        return None
    found = [entry[name] for name in ("image", "data", "url") if entry.get(name) is not None]
    if entry.get("text") is not None:
        raise shapes.wrong_shape(key, f"has an image and a text in one input: {shown(entry)}; send them as two")
    if len(found) != 1 or not isinstance(found[0], str) or not found[0]:
        raise shapes.wrong_shape(key, f"has an image without its content: {shown(entry)}; set data or url")
    return str(found[0])


def text_of(entry: Any, key: str, at: int) -> Input:
    text = entry
    if isinstance(entry, dict):
        text = entry.get("value") if entry.get("type") == "text" else entry.get("text")
    if not isinstance(text, str) and not (text is entry and shapes.is_ids(text)):
        raise shapes.wrong_shape(key, f"must hold texts and images, but entry {at} is {shown(entry)}")
    if not text:
        raise Refusal(Reason.EMPTY, f"`{key}` cannot be empty (input {at})")
    checked: Input = text
    return checked


def contents(sources: dict[int, str], fetcher: ImageFetcher, reserve: Callable[..., None]) -> dict[int, bytes]:
    """The bytes of the images; those by URL have one deadline together. Raises: Refusal that names the input.

    reserve: for their memory.
    """
    found: dict[int, bytes] = {}
    until = time.monotonic() + fetcher.deadline_secs
    for at, source in sources.items():
        raw = fetched(source, at, fetcher, until) if source.lower().startswith(WEB) else decoded(source, at)
        if not 0 < len(raw) <= LARGEST_IMAGE:
            words = f"has {len(raw)} bytes: 1 to {LARGEST_IMAGE} are read"
            raise Refusal(Reason.VALIDATION, f"The image of input {at} {words}")
        reserve(2 * len(raw), False)  # here, and in the message
        found[at] = raw
        if sum(map(len, found.values())) > MOST_BYTES:
            raise Refusal(Reason.LARGE, f"The images of a request may have {MOST_BYTES} bytes together: send fewer")
    return found


def fetched(url: str, at: int, fetcher: ImageFetcher, until: float) -> bytes:
    try:
        return fetcher.fetch(url, until)
    except Problem as problem:
        raise Refusal(Reason.VALIDATION, f"{problem.message} (input {at})") from None


def decoded(source: str, at: int) -> bytes:
    encoded = source.partition(",")[2] if source.startswith("data:") else source
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        words = "is neither base64, nor a data URL, nor a URL with http or https"
        raise Refusal(Reason.VALIDATION, f"The image of input {at} {words}") from None


def dense(
    calls: MultiplexerCalls,
    inputs: MixedInputs,
    fetcher: ImageFetcher,
    normalize: bool,
    dimensions: int | None,
    **options: Any,
) -> list[np.ndarray]:
    """Blocks of [rows, width] float32, a row for each input. options: of the texts. Raises: Refusal."""
    if not inputs.images:
        texts = calls.texts(list(inputs.texts.values()))
        return calls.dense(texts, normalize=normalize, dimensions=dimensions, **options)
    found = contents(inputs.images, fetcher, calls.reserve)
    if not inputs.texts and len(found) > 1:
        return calls.images(list(found.values()), normalize=normalize, dimensions=dimensions)
    target = calls.selection.target
    image_requests = [
        mux.EmbedImageRequest(
            target=target, request=EmbedImageRequest(image=raw, normalize=normalize, dimensions=dimensions)
        ).SerializeToString()
        for raw in found.values()
    ]
    if not inputs.texts:
        (raw,) = calls.replies("EmbedImage", image_requests)
        replies = {0: multiplexer_replies.embedding(raw)}
    else:
        fields = {"normalize": normalize, "dimensions": dimensions, **options}
        texts = calls.texts(list(inputs.texts.values()), list(inputs.texts))
        messages = [tei.EmbedRequest(inputs=text, **fields) for text in texts]
        text_requests = [mux.EmbedRequest(target=target, request=each).SerializeToString() for each in messages]
        whole = WholeAnswer(calls.reserve)
        replies = whole.tried(
            lambda: {
                **embeddings(calls, "EmbedImage", image_requests, list(found), whole),
                **embeddings(calls, "Embed", text_requests, list(inputs.texts), whole),
            }
        )
    for reply in replies.values():
        calls.usage.add(reply.metadata)
    return [np.stack([replies[at].values[0] for at in range(len(inputs))])]


def embeddings(
    calls: MultiplexerCalls, name: str, requests: list[bytes], places: Sequence[int], whole: WholeAnswer
) -> dict[int, DenseVectors]:
    """By the place in the request, which is also that of an error."""
    raws = calls.replies(name, requests, places, whole=whole)
    return {place: multiplexer_replies.embedding(raw) for place, raw in zip(places, raws, strict=True)}
