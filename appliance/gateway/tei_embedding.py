"""TEI's routes whose answers are vectors, or are computed from them: `/embed`, `/embed_sparse`, `/embed_all` and
`/similarity`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.arrow_bodies import query_options, query_parameter, send_arrow
from appliance.gateway.cards import EMBEDDING, MULTIVECTOR
from appliance.gateway.cards import SPARSE as SPARSE_TASK
from appliance.gateway.image_inputs import dense, mixed
from appliance.gateway.multiplexer_calls import DENSE, SPARSE, TOKENS
from appliance.gateway.multiplexer_replies import SparseVector
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import encoding_options, model_of
from appliance.gateway.vector_formats import OUTPUT_DTYPE, converted, dtype_value, refuse_unless_unit


class TeiEmbedResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        if bodies.media_type(request) == bodies.ARROW:
            options = query_options(request)
            normalize = query_parameter(request, "normalize", shapes.as_json(check.boolean), True)
            dimensions = query_parameter(request, "dimensions", shapes.as_json(shapes.DIMENSIONS))
            dtype = query_parameter(request, "output_dtype", OUTPUT_DTYPE, "float32")
            refuse_unless_unit(dtype, normalize)
            fields = {"normalize": normalize, "dimensions": dimensions, "output_dtype": dtype_value(dtype)}
            send_arrow(self, request, response, DENSE, (EMBEDDING,), options, **fields)
        else:
            self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        inputs = mixed(body, "inputs")
        normalize = shapes.get(body, "normalize", check.boolean, True, null=False)
        dimensions = shapes.get(body, "dimensions", shapes.DIMENSIONS)
        dtype = shapes.get(body, "output_dtype", OUTPUT_DTYPE, "float32")
        refuse_unless_unit(dtype, normalize)
        selection = self.select(request, model_of(body), EMBEDDING)
        options = encoding_options(body, selection)
        calls = self.calls(request, selection, len(inputs))
        fetcher = self.refuse_text_model(selection, inputs)
        blocks = dense(calls, inputs, fetcher, normalize, dimensions, **options.message_fields())
        blocks = [converted(block, dtype) for block in blocks]
        pieces = responses.json_list(blocks, lambda _, row: row)
        responses.send_json(request, response, calls.usage, pieces, len(inputs))


class TeiEmbedSparseResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        if bodies.media_type(request) == bodies.ARROW:
            send_arrow(self, request, response, SPARSE, (SPARSE_TASK,), query_options(request))
        else:
            self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        inputs = shapes.inputs(body, "inputs")
        selection = self.select(request, model_of(body), SPARSE_TASK)
        options = encoding_options(body, selection)
        calls = self.calls(request, selection, len(inputs))
        texts = calls.texts(inputs)
        rows = list(calls.sparse(texts, **options.message_fields()))
        responses.send_json(request, response, calls.usage, sparse_json(rows), len(texts))


def sparse_json(rows: list[SparseVector]) -> Iterator[bytes]:
    yield b"["
    for at, (indices, values) in enumerate(rows):
        pairs = zip(indices.tolist(), responses.json_numbers(values), strict=True)
        row = ",".join(f'{{"index":{index},"value":{value}}}' for index, value in pairs)
        yield f"{',' if at else ''}[{row}]".encode()
    yield b"]"


class TeiEmbedAllResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        if bodies.media_type(request) == bodies.ARROW:
            dtype = dtype_value(query_parameter(request, "output_dtype", OUTPUT_DTYPE, "float32"))
            tasks = (MULTIVECTOR, EMBEDDING)
            send_arrow(self, request, response, TOKENS, tasks, query_options(request), output_dtype=dtype)
        else:
            self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        inputs = shapes.inputs(body, "inputs")
        selection = self.select(request, model_of(body), MULTIVECTOR, EMBEDDING)
        options = encoding_options(body, selection).message_fields()
        calls = self.calls(request, selection, len(inputs))
        blocks = list(calls.tokens(calls.texts(inputs), **options))

        def pieces() -> Iterator[bytes]:
            yield b"["
            for at, tokens in enumerate(blocks):
                yield (b"," if at else b"") + responses.dumps(tokens)
            yield b"]"

        responses.send_json(request, response, calls.usage, pieces(), sum(map(len, blocks)))


class TeiSimilarityResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.respond(request, response, bodies.read_object(request))

    def respond(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        inputs = shapes.need(body, "inputs", check.table)
        source = shapes.need(inputs, "source_sentence", shapes.string)
        sentences = shapes.need(inputs, "sentences", shapes.strings)
        selection = self.select(request, model_of(body), EMBEDDING)
        options = encoding_options(shapes.get(body, "parameters", check.table, {}), selection)
        texts = shapes.bounded([source, *shapes.bounded(sentences, "sentences")], "inputs")
        calls = self.calls(request, selection, len(texts))
        blocks = calls.dense(texts, **options.message_fields(), normalize=False)
        similarities = np.concatenate([cosines(blocks[0][0], block) for block in blocks])[1:]
        responses.send_json(request, response, calls.usage, iter([responses.dumps(similarities)]), 1)


def cosines(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """[n] float32; 0 where either vector is zero."""
    lengths = np.linalg.norm(one.astype(np.float64)) * np.linalg.norm(many.astype(np.float64), axis=1)
    dots = many.astype(np.float64) @ one.astype(np.float64)
    return np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths != 0).astype(np.float32)
