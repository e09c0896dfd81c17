"""Arrow IPC as body and answer of `/embed`, `/embed_sparse` and `/embed_all`: n rows in, n rows out, nulls in place."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import falcon
import pyarrow as pa

from appliance.core import fields as check
from appliance.core.problems import Kind, Problem
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.multiplexer_calls import TOKENS, ArrowMethod
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.slices import of_one_vector, of_token_vectors
from appliance.gateway.tei_dialect import EncodingOptions, direction_value
from appliance.wire import arrow
from appliance.wire.envelope import NULL_ROWS, ON_ERROR_KEY


def query_parameter(request: falcon.Request, name: str, checked: check.Check, default: Any = None) -> Any:
    """One parameter of the query. Raises: Refusal that names it, also when it is there twice: one of them would win."""
    value: str | list[str] | None = request.params.get(name)
    if value is None:
        return default
    try:
        if isinstance(value, list):
            raise ValueError(f"stands there {len(value)} times: say it once")
        return checked(value)
    except ValueError as error:
        raise Refusal(Reason.SHAPE, f"Wrong query: `{name}` {error}") from None


def query_options(request: falcon.Request) -> EncodingOptions:
    """An Arrow body has no fields for options: they are parameters of the query."""
    direction = query_parameter(request, "truncation_direction", shapes.DIRECTION, "right")
    return EncodingOptions(
        truncate=query_parameter(request, "truncate", shapes.as_json(check.boolean)),
        truncation_direction=direction_value(direction),
        prompt_name=query_parameter(request, "prompt_name", shapes.string),
    )


def send_arrow(
    resource: Resource,
    request: falcon.Request,
    response: falcon.Response,
    method: ArrowMethod,
    tasks: Sequence[frozenset[str]],
    options: EncodingOptions,
    **more: Any,
) -> None:
    """Answer an Arrow IPC stream of texts with one of vectors. more: fields that only this method has."""
    selection = resource.select(request, query_parameter(request, "model", shapes.string), *tasks)
    column = read_texts(request)
    if options.truncate is None:
        options = replace(options, truncate=selection.auto_truncate)
    on_error = request.get_header(ON_ERROR_KEY)
    if on_error not in (None, NULL_ROWS):
        raise Refusal(Reason.SHAPE, f"{ON_ERROR_KEY} may be {NULL_ROWS}, or left out")
    calls = resource.calls(request, selection, len(column))
    metadata = ((ON_ERROR_KEY, on_error),) if on_error else ()
    fields = {**options.message_fields(), **more}
    cards = resource.gateway.selector.cards
    answer_bytes = of_token_vectors(cards.of(selection.first)) if method is TOKENS else of_one_vector
    batches = calls.batches(method, column, fields, metadata, answer_bytes)
    responses.send_json(request, response, calls.usage, stream_of(batches), len(column))
    response.content_type = bodies.ARROW


def read_texts(request: falcon.Request) -> pa.Array:
    """The texts of an Arrow body. Raises: Refusal."""
    raw = bodies.read(request)
    if arrow.is_large(raw, bodies.SMALL_BYTES):
        request.context.memory.acquire_large_permit()
    try:
        column = arrow.read_column(raw, bodies.LARGEST_BYTES, request.context.memory.reserve)
    except Problem as problem:
        reason = Reason.LARGE if problem.kind is Kind.EXHAUSTED else Reason.MALFORMED
        raise Refusal(reason, problem.message) from None
    if len(column) > shapes.MOST_TEXTS:
        raise Refusal(Reason.VALIDATION, f"{len(column)} rows > maximum of {shapes.MOST_TEXTS}")
    return column


def stream_of(batches: list[pa.RecordBatch]) -> Iterator[bytes]:
    """One IPC stream of all batches. Each is dropped from the list as soon as it is written."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=arrow.WRITE_LZ4) as writer:
        while batches:
            writer.write_batch(batches.pop(0))
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
    yield sink.getvalue()
