"""TEI's dialect: its routes, fields, defaults, headers and error bodies (TEI 1.9), without its limit on batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import falcon
import numpy as np
import pyarrow as pa

from appliance.core import fields as check
from appliance.core.problems import Kind, Problem
from appliance.gateway import answers, bodies, replies, shapes, tokenids
from appliance.gateway.choosing import Choice
from appliance.gateway.embedding import DENSE, SPARSE, Embedder
from appliance.gateway.ranking import ranked
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.wire import arrow
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

# (status, error_type); None: TEI answers in plain text, because no handler of its own has run yet.
STATUS: dict[Reason, tuple[int, str | None]] = {
    Reason.MALFORMED: (400, None),
    Reason.SHAPE: (422, None),
    Reason.MEDIA: (415, None),
    Reason.LARGE: (413, None),
    Reason.EMPTY: (400, "Empty"),
    Reason.VALIDATION: (422, "Validation"),
    Reason.TOKENIZER: (422, "Tokenizer"),
    Reason.TOKEN_IDS: (400, "Validation"),
    Reason.BACKEND: (424, "Backend"),
    Reason.OVERLOADED: (429, "Overloaded"),
    Reason.NOT_FOUND: (404, "NotFound"),
    Reason.NO_PATH: (404, "NotFound"),
    Reason.METHOD: (405, "MethodNotAllowed"),
    Reason.UNAUTHENTICATED: (401, "Unauthenticated"),
    Reason.FORBIDDEN: (403, "Forbidden"),
    Reason.UNAVAILABLE: (503, "Unhealthy"),
    Reason.TIMEOUT: (504, "Timeout"),
    Reason.INTERNAL: (500, "Internal"),
}
ON_ERROR = "x-arrow-on-error"


def render(refusal: Refusal) -> tuple[int, str, bytes]:
    """(status, content type, body) of an error."""
    status, kind = STATUS[refusal.reason]
    if kind is None:
        return status, "text/plain; charset=utf-8", refusal.message.encode()
    return status, falcon.MEDIA_JSON, answers.dumps({"error": refusal.message, "error_type": kind})


def model_of(body: dict[str, Any]) -> str | None:
    model: str | None = shapes.get(body, "model", shapes.string)
    return model


def encoding_options(body: dict[str, Any], choice: Choice) -> dict[str, Any]:
    """truncate, truncation_direction and prompt_name with TEI's defaults."""
    direction = shapes.get(body, "truncation_direction", shapes.DIRECTION, "right", null=False)
    left = direction.lower() == "left"
    return {
        "truncate": shapes.get(body, "truncate", check.boolean, choice.auto_truncate),
        "truncation_direction": tei.TRUNCATION_DIRECTION_LEFT if left else tei.TRUNCATION_DIRECTION_RIGHT,
        "prompt_name": shapes.get(body, "prompt_name", shapes.string),
    }


def without_prompt(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "prompt_name"}


class Embed(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        if bodies.media_type(request) == bodies.ARROW:
            options = query_options(request)
            options["normalize"] = query(request, "normalize", shapes.as_json(check.boolean), True)
            options["dimensions"] = query(request, "dimensions", shapes.as_json(shapes.DIMENSIONS))
            arrow_answer(self, request, response, DENSE, options)
        else:
            self.answer(request, response, bodies.read_object(request))

    def answer(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        given = shapes.inputs(body, "inputs")
        normalize = shapes.get(body, "normalize", check.boolean, True, null=False)
        dimensions = shapes.get(body, "dimensions", shapes.DIMENSIONS)
        choice = self.choose(request, model_of(body))
        options = encoding_options(body, choice)
        embedder = self.embedder(request, choice, len(given))
        texts = embedder.texts(given)
        found = embedder.dense(texts, **options, normalize=normalize, dimensions=dimensions)
        answers.send(request, response, embedder.spent, answers.listed(found, lambda _, row: row), len(texts))


class EmbedSparse(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        if bodies.media_type(request) == bodies.ARROW:
            arrow_answer(self, request, response, SPARSE, query_options(request))
        else:
            self.answer(request, response, bodies.read_object(request))

    def answer(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        given = shapes.inputs(body, "inputs")
        choice = self.choose(request, model_of(body))
        options = encoding_options(body, choice)
        embedder = self.embedder(request, choice, len(given))
        texts = embedder.texts(given)
        found = list(embedder.sparse(texts, **options))
        answers.send(request, response, embedder.spent, sparse_json(found), len(texts))


def sparse_json(rows: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[bytes]:
    yield b"["
    for at, (indices, values) in enumerate(rows):
        pairs = zip(indices.tolist(), answers.numbers(values), strict=True)
        row = ",".join(f'{{"index":{index},"value":{value}}}' for index, value in pairs)
        yield f"{',' if at else ''}[{row}]".encode()
    yield b"]"


class EmbedAll(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        given = shapes.inputs(body, "inputs")
        choice = self.choose(request, model_of(body))
        options = encoding_options(body, choice)
        embedder = self.embedder(request, choice, len(given))
        requests = [
            mux.EmbedAllRequest(
                target=choice.target, request=tei.EmbedAllRequest(inputs=text, **options)
            ).SerializeToString()
            for text in embedder.texts(given)
        ]
        found: list[np.ndarray] = []
        for reply in embedder.replies("EmbedAll", requests):
            tokens, told = replies.token_embeddings(reply, len(found))
            embedder.spent.add(told)
            found.append(tokens)

        def pieces() -> Iterator[bytes]:
            yield b"["
            for at, tokens in enumerate(found):
                yield (b"," if at else b"") + answers.dumps(tokens)
            yield b"]"

        answers.send(request, response, embedder.spent, pieces(), sum(map(len, found)))


class Predict(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.answer(request, response, bodies.read_object(request))

    def answer(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        given, single = shapes.pairs(body)
        raw = shapes.get(body, "raw_scores", check.boolean, False, null=False)
        choice = self.choose(request, model_of(body))
        options = without_prompt(encoding_options(body, choice))
        for at, texts in enumerate(given):
            if not any(texts):
                raise Refusal(Reason.EMPTY, f"`inputs` cannot be empty (input {at})")
        embedder = self.embedder(request, choice)
        requests = [
            mux.PredictPairRequest(
                target=choice.target, request=tei.PredictPairRequest(inputs=texts, raw_scores=raw, **options)
            ).SerializeToString()
            for texts in given
        ]
        found: list[list[dict[str, Any]]] = []
        for reply in embedder.replies("PredictPair", requests):
            answer = replies.predictions(reply, len(found))
            embedder.spent.add(answer.metadata)
            found.append([{"score": np.float32(one.score), "label": one.label} for one in answer.predictions])
        answers.send(request, response, embedder.spent, iter([answers.dumps(found[0] if single else found)]), 1)


class Rerank(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        self.answer(request, response, bodies.read_object(request))

    def answer(self, request: falcon.Request, response: falcon.Response, body: dict[str, Any]) -> None:
        query = shapes.need(body, "query", shapes.string)
        texts = shapes.need(body, "texts", shapes.strings)
        raw = shapes.get(body, "raw_scores", check.boolean, False, null=False)
        with_text = shapes.get(body, "return_text", check.boolean, False, null=False)
        choice = self.choose(request, model_of(body))
        options = without_prompt(encoding_options(body, choice))
        if not texts:
            raise Refusal(Reason.EMPTY, "`texts` cannot be empty")
        if len(texts) > shapes.MOST_TEXTS:
            raise Refusal(
                Reason.VALIDATION, f"batch size {len(texts)} > maximum allowed batch size {shapes.MOST_TEXTS}"
            )
        embedder = self.embedder(request, choice)
        found = [
            {"index": rank.index}
            | ({"text": texts[rank.index]} if with_text else {})
            | {"score": np.float32(rank.score)}
            for rank in ranked(embedder, query, texts, raw_scores=raw, **options)
        ]
        answers.send(request, response, embedder.spent, iter([answers.dumps(found)]), 1)


class Similarity(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        given = shapes.need(body, "inputs", check.table)
        source = shapes.need(given, "source_sentence", shapes.string)
        sentences = shapes.need(given, "sentences", shapes.strings)
        choice = self.choose(request, model_of(body))
        options = encoding_options(shapes.get(body, "parameters", check.table, {}), choice)
        texts = shapes.bounded([source, *shapes.bounded(sentences, "sentences")], "inputs")
        embedder = self.embedder(request, choice, len(texts))
        blocks = embedder.dense(texts, **options, normalize=False)
        found = np.concatenate([cosines(blocks[0][0], block) for block in blocks])[1:]
        answers.send(request, response, embedder.spent, iter([answers.dumps(found)]), 1)


def cosines(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """[n] float32; a zero vector is like nothing: 0."""
    lengths = np.linalg.norm(one.astype(np.float64)) * np.linalg.norm(many.astype(np.float64), axis=1)
    dots = many.astype(np.float64) @ one.astype(np.float64)
    return np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths != 0).astype(np.float32)


class Tokenize(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        value = body.get("inputs")
        texts = [value] if isinstance(value, str) else shapes.need(body, "inputs", shapes.strings)
        options = {
            "add_special_tokens": shapes.get(body, "add_special_tokens", check.boolean, True, null=False),
            "prompt_name": shapes.get(body, "prompt_name", shapes.string),
        }
        choice = self.choose(request, model_of(body))
        embedder = self.embedder(request, choice)
        requests = [
            mux.EncodeRequest(
                target=choice.target, request=tei.EncodeRequest(inputs=text, **options)
            ).SerializeToString()
            for text in shapes.bounded(texts, "inputs")
        ]
        told = (replies.message("Tokenize", tei.EncodeResponse, raw) for raw in embedder.replies("Tokenize", requests))
        found = [[token_json(token) for token in reply.tokens] for reply in told]
        answers.send(request, response, embedder.spent, iter([answers.dumps(found)]), 1)


def token_json(token: tei.SimpleToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "special": token.special,
        "start": token.start if token.HasField("start") else None,
        "stop": token.stop if token.HasField("stop") else None,
    }


class Decode(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        skip = shapes.get(body, "skip_special_tokens", check.boolean, True, null=False)
        given = shapes.need(body, "ids", ids_lists)
        choice = self.choose(request, model_of(body))
        embedder = self.embedder(request, choice)
        tokenids.refuse_unknown(choice, enumerate(given), several=len(given) > 1)
        requests = [
            mux.DecodeRequest(
                target=choice.target, request=tei.DecodeRequest(ids=ids, skip_special_tokens=skip)
            ).SerializeToString()
            for ids in shapes.bounded(given, "ids")
        ]
        with tokenids.decoding():
            told = list(embedder.replies("Decode", requests))
        found = [replies.message("Decode", tei.DecodeResponse, raw).text for raw in told]
        answers.send(request, response, embedder.spent, iter([answers.dumps(found)]), 1)


def ids_lists(value: Any) -> list[list[int]]:
    if shapes.is_ids(value):
        return [value]
    if isinstance(value, list) and all(map(shapes.is_ids, value)):
        return value
    raise ValueError("must be a list of token ids, or a list of such lists")


class AnyTask(Resource):
    """`POST /`, as clients of a single model know it: what the model does decides."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        choice = self.choose(request, model_of(body))
        info = told_info(self, request, choice)
        kinds: dict[int, type[Predict | Rerank]] = {tei.MODEL_TYPE_CLASSIFIER: Predict, tei.MODEL_TYPE_RERANKER: Rerank}
        embed = EmbedSparse if choice.first.spec.pooling == "splade" else Embed
        kinds.get(info.model_type, embed)(self.gateway).answer(request, response, body)


def told_info(resource: Resource, request: falcon.Request, choice: Choice) -> tei.InfoResponse:
    (reply,) = resource.embedder(request, choice).replies(
        "Info", [mux.InfoRequest(target=choice.target).SerializeToString()]
    )
    info: tei.InfoResponse = replies.message("Info", tei.InfoResponse, reply)
    return info


# -- Arrow bodies -----------------------------------------------------------------------------------------------------


def query(request: falcon.Request, name: str, checked: check.Check, default: Any = None) -> Any:
    """A parameter of the query. Raises: Refusal that names it, also when it is there twice: one of them would win."""
    given: str | list[str] | None = request.params.get(name)
    if given is None:
        return default
    try:
        if isinstance(given, list):
            raise ValueError(f"stands there {len(given)} times: say it once")
        return checked(given)
    except ValueError as error:
        raise Refusal(Reason.SHAPE, f"Wrong query: `{name}` {error}") from None


def query_options(request: falcon.Request) -> dict[str, Any]:
    """An Arrow body has no room for options: they are in the query."""
    left = query(request, "truncation_direction", shapes.DIRECTION, "right").lower() == "left"
    return {
        "truncate": query(request, "truncate", shapes.as_json(check.boolean)),
        "truncation_direction": tei.TRUNCATION_DIRECTION_LEFT if left else tei.TRUNCATION_DIRECTION_RIGHT,
        "prompt_name": query(request, "prompt_name", shapes.string),
    }


def arrow_answer(
    resource: Resource, request: falcon.Request, response: falcon.Response, kind: Any, options: dict[str, Any]
) -> None:
    """An Arrow IPC stream of texts, answered with one of vectors: n rows in, n rows out, nulls in place."""
    choice = resource.choose(request, query(request, "model", shapes.string))
    column = arrow_texts(request)
    options["truncate"] = choice.auto_truncate if options["truncate"] is None else options["truncate"]
    wanted = request.get_header(ON_ERROR)
    if wanted not in (None, "null"):
        raise Refusal(Reason.SHAPE, f"{ON_ERROR} may be null, or left out")
    embedder: Embedder = resource.embedder(request, choice, len(column))
    found = embedder.batches(kind, column, options, metadata=((ON_ERROR, wanted),) if wanted else ())
    answers.send(request, response, embedder.spent, arrow_pieces(found), len(column))
    response.content_type = bodies.ARROW


def arrow_texts(request: falcon.Request) -> pa.Array:
    """The texts of an Arrow body. Raises: Refusal."""
    raw = bodies.read(request)
    if arrow.is_large(raw, bodies.SMALL_BYTES):
        request.context.place.take()
    try:
        column = arrow.read_column(raw, bodies.LARGEST_BYTES, request.context.place.book)
    except Problem as problem:
        reason = Reason.LARGE if problem.kind is Kind.EXHAUSTED else Reason.MALFORMED
        raise Refusal(reason, problem.message) from None
    if len(column) > shapes.MOST_TEXTS:
        raise Refusal(Reason.VALIDATION, f"{len(column)} rows > maximum of {shapes.MOST_TEXTS}")
    return column


def arrow_pieces(batches: list[pa.RecordBatch]) -> Iterator[bytes]:
    """One IPC stream of all batches, each let go as soon as it is written."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        while batches:
            writer.write_batch(batches.pop(0))
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
    yield sink.getvalue()
