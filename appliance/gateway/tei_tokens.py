"""TEI's routes of the tokenizer: `/tokenize` and `/decode`."""

from __future__ import annotations

from typing import Any

import falcon

from appliance.core import fields as check
from appliance.gateway import bodies, multiplexer_replies, responses, shapes, tokenids
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import model_of
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux


class TeiTokenizeResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        value = body.get("inputs")
        texts = [value] if isinstance(value, str) else shapes.need(body, "inputs", shapes.strings)
        options = {
            "add_special_tokens": shapes.get(body, "add_special_tokens", check.boolean, True, null=False),
            "prompt_name": shapes.get(body, "prompt_name", shapes.string),
        }
        selection = self.select(request, model_of(body))
        calls = self.calls(request, selection)
        requests = [
            mux.EncodeRequest(
                target=selection.target, request=tei.EncodeRequest(inputs=text, **options)
            ).SerializeToString()
            for text in shapes.bounded(texts, "inputs")
        ]
        rows = [
            [token_json(token) for token in multiplexer_replies.message("Tokenize", tei.EncodeResponse, raw).tokens]
            for raw in calls.whole_replies("Tokenize", requests)
        ]
        responses.send_json(request, response, calls.usage, iter([responses.dumps(rows)]), 1)


def token_json(token: tei.SimpleToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "special": token.special,
        "start": token.start if token.HasField("start") else None,
        "stop": token.stop if token.HasField("stop") else None,
    }


class TeiDecodeResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        skip = shapes.get(body, "skip_special_tokens", check.boolean, True, null=False)
        id_lists = shapes.need(body, "ids", lists_of_ids)
        selection = self.select(request, model_of(body))
        calls = self.calls(request, selection)
        tokenids.refuse_unknown(selection, enumerate(id_lists), several=len(id_lists) > 1)
        requests = [
            mux.DecodeRequest(
                target=selection.target, request=tei.DecodeRequest(ids=ids, skip_special_tokens=skip)
            ).SerializeToString()
            for ids in shapes.bounded(id_lists, "ids")
        ]
        with tokenids.decoding():
            replies = calls.whole_replies("Decode", requests)
        texts = [multiplexer_replies.message("Decode", tei.DecodeResponse, raw).text for raw in replies]
        responses.send_json(request, response, calls.usage, iter([responses.dumps(texts)]), 1)


def lists_of_ids(value: Any) -> list[list[int]]:
    if shapes.is_ids(value):
        return [value]
    if isinstance(value, list) and all(map(shapes.is_ids, value)):
        return value
    raise ValueError("must be a list of token ids, or a list of such lists")
