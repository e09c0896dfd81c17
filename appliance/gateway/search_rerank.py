"""`/search-rerank`: a query and candidates in; one order out, fused of several scores and reranked, with all parts.

Dense and sparse scores are products, token scores MaxSim. They are fused by reciprocal ranks, or as weighted sums of
scores between 0 and 1; the best of that order may go to a reranker, whose order they then have. A candidate may bring
vectors that its caller has stored; what it does not bring is computed of its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import falcon
import numpy as np

from appliance.core import fields as check
from appliance.core.fields import Schema
from appliance.gateway import bodies, responses, shapes
from appliance.gateway.cards import MULTIVECTOR, QUERY_PROMPTS, RANKING, TEXT_PROMPTS
from appliance.gateway.hybrid import OUTPUTS, Leg, legs_of, nullable
from appliance.gateway.multiplexer_calls import MultiplexerCalls, ResponseUsage
from appliance.gateway.ranking import rank_texts
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.resource import Resource
from appliance.gateway.tei_dialect import model_of
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire import scoring

MOST_CANDIDATES = 1000
MOST_PRODUCTS = 50_000_000  # of two tokens; some seconds at a width of 1,024
RERANKED = 50  # of the fused order, unless the request says otherwise
FUSION = check.one_of("rrf", "weighted")
COUNT = check.whole(1, MOST_CANDIDATES)
WEIGHT = check.number(0, 1000)
RERANK_SCHEMA: Schema = {
    "anyOf": [
        check.boolean.schema,
        {"type": "object", "properties": {"model": nullable(shapes.string.schema), "top": nullable(COUNT.schema)}},
        {"type": "null"},
    ]
}
NUMBERS_SCHEMA: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 1}
CANDIDATE_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "text": shapes.TEXT_SCHEMA,
        "dense": NUMBERS_SCHEMA,
        "sparse": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"index": shapes.UINT.schema, "value": {"type": "number"}},
                "required": ["index", "value"],
            },
        },
        "tokens": {"type": "array", "items": NUMBERS_SCHEMA, "minItems": 1},
    },
}
CANDIDATES_SCHEMA: Schema = {
    "type": "array",
    "items": {"anyOf": [shapes.TEXT_SCHEMA, CANDIDATE_SCHEMA]},
    "minItems": 1,
    "maxItems": MOST_CANDIDATES,
}


class Candidate(NamedTuple):
    """text: None where all that is wanted came with it. stored: its own vectors, by OUTPUTS."""

    text: str | None
    stored: dict[str, Any]


class Scores:
    """Of all candidates, by one kind of vectors or fused. values, ranks: [candidates]."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.ranks = values, scoring.ranks_of(values)

    def part(self, at: int) -> dict[str, Any]:
        return {"score": float(self.values[at]), "rank": int(self.ranks[at])}


class SearchRerankResource(Resource):
    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        body = bodies.read_object(request)
        query = shapes.need(body, "query", shapes.string)
        if not query:
            raise Refusal(Reason.EMPTY, "`query` cannot be empty")
        candidates = candidates_of(body)
        fusion = shapes.get(body, "fusion", FUSION, "rrf")
        weights = weights_of(body)
        top_n = shapes.get(body, "top_n", shapes.TOP_N, MOST_CANDIDATES)
        with_text = shapes.get(body, "return_text", check.boolean, False)
        reranker = rerank_options(body)
        has_legs = reranker is None or any(shapes.is_given(body, name) for name in OUTPUTS)
        legs = legs_of(self, request, body) if has_legs else []
        usage = ResponseUsage(", ".join(dict.fromkeys(leg.selection.names for leg in legs)))
        scores = {leg.name: Scores(self.scored(request, leg, query, candidates, usage)) for leg in legs}
        fused = Scores(fused_scores(scores, fusion, weights, len(candidates)))
        order = [int(at) for at in np.argsort(fused.ranks)]
        reranked: dict[int, float] = {}
        if reranker is not None:
            chosen = order[: reranker["top"]]
            reranked = self.reranked(request, reranker["model"] or model_of(body), query, candidates, chosen, usage)
            order[: len(chosen)] = sorted(chosen, key=lambda at: -reranked[at])
        entries = [entry(at, scores, fused, reranked) for at in order[:top_n]]
        for each in entries if with_text else ():
            each["text"] = candidates[each["index"]].text
        answer = {"results": entries, "instances": {leg.name: leg.selection.names for leg in legs}}
        responses.send_json(request, response, usage, iter([responses.dumps(answer)]), 1)

    def scored(
        self, request: falcon.Request, leg: Leg, query: str, candidates: Sequence[Candidate], usage: ResponseUsage
    ) -> np.ndarray:
        """[candidates]: how well each goes with the query, by one kind of vectors."""
        calls = self.calls(request, leg.selection, len(candidates) + 1)
        missing = [at for at, each in enumerate(candidates) if leg.name not in each.stored]
        texts = [text_of(candidates, at, leg.name) for at in missing]
        of_query, of_texts = embedded(calls, leg, query, texts, self.prompts(leg))
        usage.include(calls.usage)
        computed = iter(of_texts)
        vectors = [each.stored[leg.name] if leg.name in each.stored else next(computed) for each in candidates]
        refuse_misfits(leg.name, of_query, vectors, candidates)
        if leg.name == "tokens" and len(of_query) * sum(map(len, vectors)) > MOST_PRODUCTS:
            words = f"over {MOST_PRODUCTS} products of two tokens: send fewer candidates, or shorter ones"
            raise Refusal(Reason.VALIDATION, f"candidates: MaxSim would take {words}")
        compare = KINDS[leg.name][1]
        scores = np.array([compare(of_query, vector) for vector in vectors])
        if not np.isfinite(scores).all():
            at = int(np.argmin(np.isfinite(scores)))
            raise Refusal(Reason.VALIDATION, f"candidates: the {leg.name} score of entry {at} is not a finite number")
        return scores

    def prompts(self, leg: Leg) -> tuple[str | None, str | None]:
        """Of the query and of the texts, where the model has any for these purposes."""
        name = self.gateway.selector.cards.prompt_name
        return name(leg.selection.first, QUERY_PROMPTS), name(leg.selection.first, TEXT_PROMPTS)

    def reranked(
        self,
        request: falcon.Request,
        model: str | None,
        query: str,
        candidates: Sequence[Candidate],
        chosen: Sequence[int],
        usage: ResponseUsage,
    ) -> dict[int, float]:
        selection = self.select(request, model, RANKING, MULTIVECTOR)
        calls = self.calls(request, selection, len(chosen))
        texts = [text_of(candidates, at, "rerank") for at in chosen]
        ranks = rank_texts(calls, query, texts, truncate=selection.auto_truncate)
        usage.include(calls.usage)
        return {chosen[rank.index]: rank.score for rank in ranks}


# -- the request ------------------------------------------------------------------------------------------------------


def candidates_of(body: dict[str, Any]) -> list[Candidate]:
    value = body.get("candidates")
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_CANDIDATES:
        raise shapes.wrong_shape("candidates", f"must be a list of 1 to {MOST_CANDIDATES} texts or objects")
    return [candidate(entry, at) for at, entry in enumerate(value)]


def candidate(entry: Any, at: int) -> Candidate:
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str | None):
        raise shapes.wrong_shape("candidates", f"must be texts or objects with a text, but entry {at} is neither")
    try:
        stored = {name: STORED[name](entry[name]) for name in OUTPUTS if entry.get(name) is not None}
    except (ValueError, OverflowError) as error:
        raise shapes.wrong_shape("candidates", f"has vectors in entry {at} that cannot be read: {error}") from None
    return Candidate(entry.get("text"), stored)


def text_of(candidates: Sequence[Candidate], at: int, purpose: str) -> str:
    if not candidates[at].text:
        raise Refusal(Reason.VALIDATION, f"candidates: entry {at} has no text, which {purpose} needs")
    return str(candidates[at].text)


def finite(rows: Any, dimensions: int) -> np.ndarray:
    """Of a list of numbers, or of lists of them."""
    if not isinstance(rows, list) or (dimensions > 1 and not all(isinstance(row, list) for row in rows)):
        raise ValueError("a list of numbers is needed" if dimensions == 1 else "a list of lists of numbers is needed")
    for row in rows if dimensions > 1 else [rows]:
        if not {type(value) for value in row} <= {int, float}:
            raise ValueError(
                f"{check.shown(next(each for each in row if type(each) not in (int, float)))} is no number"
            )
    with np.errstate(over="ignore"):  # what is too large for float32 is refused below
        numbers = np.array(rows, np.float32)
    if numbers.ndim != dimensions or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError("numbers that are finite are needed, and rows of one length")
    return numbers


def stored_sparse(value: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and {"index", "value"} <= set(each) for each in value
    ):
        raise ValueError("a list of objects with index and value is needed")
    entries = {shapes.UINT(each["index"]): each["value"] for each in value}
    return np.array(list(entries), np.uint32), finite([*entries.values(), 0.0], 1)[:-1]


STORED: dict[str, Callable[[Any], Any]] = {
    "dense": lambda value: finite(value, 1),
    "sparse": stored_sparse,
    "tokens": lambda value: finite(value, 2),
}


def weights_of(body: dict[str, Any]) -> dict[str, float]:
    given = shapes.get(body, "weights", check.table, {})
    if unknown := sorted(set(given) - set(OUTPUTS)):
        raise shapes.wrong_shape("weights", f"has {check.shown(unknown[0])}: {', '.join(OUTPUTS)} are known")
    return {name: shapes.get(given, name, WEIGHT, 1.0) for name in OUTPUTS}


def rerank_options(body: dict[str, Any]) -> dict[str, Any] | None:
    """None where nothing is reranked."""
    value = body.get("rerank")
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, dict):
        raise shapes.wrong_shape("rerank", f"must be true, false or an object, not {check.shown(value)}")
    given = {} if value is True else value
    return {"model": shapes.get(given, "model", shapes.string), "top": shapes.get(given, "top", COUNT, RERANKED)}


# -- vectors of texts, and how they are compared ----------------------------------------------------------------------


def embedded(
    calls: MultiplexerCalls, leg: Leg, query: str, texts: list[str], prompts: tuple[str | None, str | None]
) -> tuple[Any, list[Any]]:
    """Of the query, and of the texts that are compared with it, in one generation of the instance. Raises: Refusal."""
    embed, whole = KINDS[leg.name][0], WholeAnswer(calls.reserve) if texts else None

    def ask() -> tuple[Any, list[Any]]:
        (of_query,) = embed(calls, leg, [query], prompts[0], whole)
        return of_query, list(embed(calls, leg, texts, prompts[1], whole)) if texts else []

    return whole.tried(ask) if whole else ask()


def dense(
    calls: MultiplexerCalls, leg: Leg, texts: list[str], prompt: str | None, whole: WholeAnswer | None
) -> Iterator[np.ndarray]:
    fields = {"normalize": leg.options.get("normalize") is not False, "dimensions": leg.options.get("dimensions")}
    truncate = leg.selection.auto_truncate
    prompt = leg.options.get("prompt_name") or prompt
    for block in calls.dense(texts, whole, truncate=truncate, prompt_name=prompt, **fields):
        yield from block


def sparse(
    calls: MultiplexerCalls, leg: Leg, texts: list[str], prompt: str | None, whole: WholeAnswer | None
) -> Iterator[Any]:
    prompt = leg.options.get("prompt_name") or prompt
    yield from calls.sparse(texts, whole, truncate=leg.selection.auto_truncate, prompt_name=prompt)


def tokens(
    calls: MultiplexerCalls, leg: Leg, texts: list[str], prompt: str | None, whole: WholeAnswer | None
) -> Iterator[np.ndarray]:
    prompt = leg.options.get("prompt_name") or prompt
    yield from calls.tokens(texts, whole, truncate=leg.selection.auto_truncate, prompt_name=prompt)


KINDS: dict[str, tuple[Callable[..., Iterator[Any]], Callable[[Any, Any], float]]] = {
    "dense": (dense, lambda one, other: float(np.dot(one, other))),
    "sparse": (sparse, scoring.sparse_product),
    "tokens": (tokens, scoring.maxsim),
}


def refuse_misfits(name: str, query: Any, vectors: Sequence[Any], candidates: Sequence[Candidate]) -> None:
    """Raises: Refusal for stored vectors of another width than the query's."""
    if name == "sparse":
        return
    for at, vector in enumerate(vectors):
        if vector.shape[-1] != query.shape[-1]:
            words = f"candidates: entry {at} has {name} vectors of {vector.shape[-1]} numbers, the query of"
            raise Refusal(Reason.VALIDATION, f"{words} {query.shape[-1]}: are they of this model?")


# -- the order --------------------------------------------------------------------------------------------------------


def fused_scores(scores: dict[str, Scores], fusion: str, weights: dict[str, float], count: int) -> np.ndarray:
    """[candidates]: one score of all kinds; 0 where there is none."""
    if not scores:
        return np.zeros(count)
    scaled = scoring.reciprocal_ranks if fusion == "rrf" else scoring.between_0_and_1
    parts = [scaled(each.values) for each in scores.values()]
    return scoring.weighted_sum(parts, [weights[name] for name in scores])


def entry(at: int, scores: dict[str, Scores], fused: Scores, reranked: dict[int, float]) -> dict[str, Any]:
    """A candidate as it is answered: its place in the request, what orders it, and every part of that."""
    parts: dict[str, Any] = {name: each.part(at) for name, each in scores.items()}
    if scores:
        parts["fused"] = fused.part(at)
    if at in reranked:
        parts["rerank"] = {"score": reranked[at]}
    return {"index": at, "score": reranked.get(at, float(fused.values[at])), "parts": parts}
