"""vLLM's routes beside OpenAI's: `/score` and `/pooling`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import EMBEDDING, MULTIVECTOR, RANKING
from appliance.gateway.multiplexer_calls import MultiplexerCalls
from appliance.gateway.ranking import rank_for_each
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei_embedding import cosines
from appliance.gateway.unmet_options import EMBED_DTYPE, POOLING_TASK, cuts
from appliance.wire.quantization import base64_of
from appliance.wire.tei.v1 import tei_pb2 as tei

SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2"))


class ScoreResource(Resource):
    """How well texts go together: by a reranker, or by the cosine of an embedder where the instance is one."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        model = shapes.get(body, "model", shapes.string)
        pairs = pairs_of(*(side(body, names) for names in SIDES))
        must_cut = cuts(body)
        selection = self.select(request, model, RANKING, EMBEDDING, MULTIVECTOR)
        calls = self.calls(request, selection, 2 * len(pairs))
        cards = self.gateway.selector.cards
        score = similarities if cards.fits(selection.first, EMBEDDING) else ranks
        if score is ranks and cards.fits(selection.first, MULTIVECTOR):
            score = ranks_by_query
        scores = score(calls, pairs, selection.auto_truncate or must_cut)
        data = [{"index": at, "object": "score", "score": np.float32(score)} for at, score in enumerate(scores)]
        answer = envelope("score", model or selection.model_id, calls) | {"object": "list", "data": data}
        responses.send_json(request, response, calls.usage, iter([responses.dumps(answer)]), 1)


def side(body: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """One side of the pairs, under one of its names. Raises: Refusal."""
    name = next((each for each in names if shapes.is_given(body, each)), names[0])
    value = body.get(name)
    texts = [value] if isinstance(value, str) else shapes.need(body, name, shapes.strings)
    return shapes.bounded(texts, name)


def pairs_of(ones: list[str], others: list[str]) -> list[tuple[str, str]]:
    """One with all, or each with its own. Raises: Refusal."""
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise Refusal(Reason.VALIDATION, f"`text_1` has {len(ones)} texts and `text_2` {len(others)}: as many, or one")
    return list(zip(ones, others, strict=True))


def ranks(calls: MultiplexerCalls, pairs: list[tuple[str, str]], truncate: bool) -> list[float]:
    """By one ranking where all have one query, else as pairs of one stream: a reranker has the same score for both."""
    if len({query for query, _ in pairs}) == 1:
        return ranks_by_query(calls, pairs, truncate)
    replies = calls.predictions([tei.PredictPairRequest(inputs=pair, truncate=truncate) for pair in pairs])
    for reply in replies:
        if len(reply.predictions) != 1:
            labels = f"{len(reply.predictions)} labels"
            raise Refusal(Reason.BACKEND, f"{calls.selection.names} ranks no texts: it is a classifier with {labels}")
    return [reply.predictions[0].score for reply in replies]


def ranks_by_query(calls: MultiplexerCalls, pairs: list[tuple[str, str]], truncate: bool) -> list[float]:
    """By one ranking for each query."""
    scores = [0.0] * len(pairs)
    places_of: dict[str, list[int]] = {}
    for at, (one, _) in enumerate(pairs):
        places_of.setdefault(one, []).append(at)
    texts_of = {query: [pairs[at][1] for at in places] for query, places in places_of.items()}
    for query, ranks in rank_for_each(calls, texts_of, truncate=truncate).items():
        for rank in ranks:
            scores[places_of[query][rank.index]] = rank.score
    return scores


def similarities(calls: MultiplexerCalls, pairs: list[tuple[str, str]], truncate: bool) -> list[float]:
    """Each text is computed once: one beside a hundred thousand would be as many copies of it."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors = np.concatenate(calls.dense(texts, truncate=truncate, normalize=True))
    place = {text: at for at, text in enumerate(texts)}
    return [float(cosines(vectors[place[one]], vectors[place[other]][np.newaxis])[0]) for one, other in pairs]


class PoolingResource(Resource):
    """The vector of each text, under the names that vLLM has for it."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        model = shapes.get(body, "model", shapes.string)
        inputs = shapes.inputs(body, "input")
        encoding = shapes.get(body, "encoding_format", shapes.ENCODING_FORMAT, "float")
        dimensions = shapes.get(body, "dimensions", shapes.DIMENSIONS)
        shapes.get(body, "user", shapes.string)  # OpenAI's, checked and not used
        shapes.get(body, "task", POOLING_TASK)
        shapes.get(body, "embed_dtype", EMBED_DTYPE)
        # The newer name of the older one.
        normalize = shapes.get(
            body, "use_activation", check.boolean, shapes.get(body, "normalize", check.boolean, True)
        )
        must_cut = cuts(body)
        selection = self.select(request, model, EMBEDDING)
        calls = self.calls(request, selection, len(inputs))
        texts = calls.texts(inputs)
        truncate = selection.auto_truncate or must_cut
        blocks = calls.dense(texts, truncate=truncate, normalize=normalize, dimensions=dimensions)

        def entry(index: int, row: np.ndarray) -> dict[str, Any]:
            vector = base64_of(row) if encoding == "base64" else row
            return {"index": index, "object": "pooling", "data": vector}

        def pieces() -> Iterator[bytes]:
            yield b'{"object":"list","data":'
            yield from responses.json_list(blocks, entry)
            yield b"," + responses.dumps(envelope("pool", model or selection.model_id, calls))[1:]

        responses.send_json(request, response, calls.usage, pieces(), len(texts))


def envelope(kind: str, model: str, calls: MultiplexerCalls) -> dict[str, Any]:
    tokens = calls.usage.tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"{kind}-{uuid.uuid4()}", "created": int(time.time()), "model": model, "usage": usage}
