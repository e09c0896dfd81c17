"""`/hybrid`: dense, sparse and token vectors of one text in one call, of one instance or of several."""

from __future__ import annotations

from typing import Any, NamedTuple

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.fields import Schema
from appliance.drivers.grpccalls import STATUS
from appliance.gateway import bodies, multiplexer_replies, responses, shapes
from appliance.gateway.cards import EMBEDDING, MULTIVECTOR, SPARSE
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.selection import Selection
from appliance.gateway.tei_dialect import encoding_options, model_of
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux


class Output(NamedTuple):
    """A kind of vectors. tasks: what an instance must do to give it, the best first; options: those of its own."""

    number: Any
    tasks: tuple[frozenset[str], ...]
    options: dict[str, check.Check]


OF_ALL = {"model": shapes.string, "prompt_name": shapes.string}
OUTPUTS = {
    "dense": Output(
        mux.HYBRID_OUTPUT_DENSE,
        (EMBEDDING,),
        {**OF_ALL, "normalize": check.boolean, "dimensions": shapes.DIMENSIONS},
    ),
    "sparse": Output(mux.HYBRID_OUTPUT_SPARSE, (SPARSE,), OF_ALL),
    "tokens": Output(mux.HYBRID_OUTPUT_TOKENS, (MULTIVECTOR, EMBEDDING), OF_ALL),
}
ON_ERROR = check.one_of("fail", "partial")


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def leg_schema(name: str) -> Schema:
    properties = {option: nullable(checked.schema) for option, checked in OUTPUTS[name].options.items()}
    return {"anyOf": [check.boolean.schema, {"type": "object", "properties": properties}, {"type": "null"}]}


class Leg(NamedTuple):
    """What is wanted of an instance. options: as the request has them, checked."""

    name: str
    selection: Selection
    options: dict[str, Any]

    def message(self) -> mux.HybridLeg:
        options = {key: value for key, value in self.options.items() if key != "model" and value is not None}
        return mux.HybridLeg(target=self.selection.target, output=OUTPUTS[self.name].number, **options)


def legs_of(
    resource: Resource, request: falcon.Request, body: dict[str, Any], refused: dict[str, Refusal] | None = None
) -> list[Leg]:
    """What a body asks for: `dense`, `sparse` and `tokens`, each true or its options; without any of them all that the
    model does. refused: takes those whose model there is not, where others remain. Raises: Refusal."""
    model = model_of(body)
    asked = {name: options_of(body, name) for name in OUTPUTS}
    wanted = {name: options for name, options in asked.items() if options is not None}
    if not any(shapes.is_given(body, name) for name in OUTPUTS):
        selection = resource.select(request, model, EMBEDDING, MULTIVECTOR, SPARSE)
        tasks = resource.gateway.selector.cards.tasks(selection.first)
        wanted = {name: {} for name, output in OUTPUTS.items() if tasks & output.tasks[0]} or {"dense": {}}
        return [Leg(name, selection, options) for name, options in wanted.items()]
    if not wanted:
        raise Refusal(Reason.VALIDATION, "Nothing is asked for: set dense, sparse or tokens")
    legs, unknown = [], {} if refused is None else refused
    for name, options in wanted.items():
        try:
            selection = resource.select(request, options.get("model") or model, *OUTPUTS[name].tasks)
            legs.append(Leg(name, selection, options))
        except Refusal as refusal:
            if refused is None or refusal.reason is not Reason.NOT_FOUND:
                raise
            unknown[name] = refusal
    if not legs:
        raise next(iter(unknown.values()))
    if len({leg.selection.names for leg in legs}) > 1:
        request.context.selection = None  # an error is not about the last of them
    return legs


def options_of(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Of one kind of vectors; None where it is not wanted."""
    value = body.get(name)
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise shapes.wrong_shape(name, f"must be true, false or an object, not {check.shown(value)}")
    return {option: shapes.get(value, option, checked) for option, checked in OUTPUTS[name].options.items()}


class HybridResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        text = shapes.need(body, "inputs", shapes.string)
        if not text:
            raise Refusal(Reason.EMPTY, "`inputs` cannot be empty")
        partial = shapes.get(body, "on_error", ON_ERROR, "fail") == "partial"
        refused: dict[str, Refusal] = {}
        legs = legs_of(self, request, body, refused if partial else None)
        # All legs have the same options: where one instance cuts no text unasked, none is cut.
        strictest = min((leg.selection for leg in legs), key=lambda selection: selection.auto_truncate)
        options = encoding_options(body, strictest)
        message = mux.HybridRequest(
            inputs=text, legs=[leg.message() for leg in legs], partial=partial, **options.pair_fields()
        )
        calls = self.calls(request, legs[0].selection)
        (raw,) = calls.replies("Hybrid", [message.SerializeToString()])
        reply = multiplexer_replies.message("Hybrid", mux.HybridResponse, raw)
        answer: dict[str, Any] = {"instances": {}, "passes": reply.passes}
        for name, refusal in refused.items():
            answer.setdefault("errors", {})[name] = {"code": "NOT_FOUND", "message": refusal.message}
        for leg, result in zip(legs, reply.results, strict=True):
            if result.HasField("error"):
                error = {"code": STATUS[result.error.code].name, "message": result.error.message}
                answer.setdefault("errors", {})[leg.name] = error
                continue
            calls.usage.add(result.metadata)
            answer[leg.name] = vectors_of(leg.name, result)
            answer["instances"][leg.name] = result.instance
        responses.send_json(request, response, calls.usage, iter([responses.dumps(answer)]), 1)


def vectors_of(name: str, result: Any) -> Any:
    """As TEI's routes write them."""
    if name == "dense":
        return np.array(result.embeddings, np.float32)
    if name == "tokens":
        return [np.array(token.embeddings, np.float32) for token in result.token_embeddings]
    return [{"index": entry.index, "value": np.float32(entry.value)} for entry in result.sparse_embeddings]
