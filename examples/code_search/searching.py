"""A question to the index: the nearest chunks, by request put in order by a reranker."""

import time
from typing import NamedTuple

from examples.code_search.embedding import Gateway
from examples.code_search.index import Hit, Index
from examples.code_search.indexing import answered
from examples.code_search.problems import Problem

CANDIDATES = 4  # times as many as are shown go to the reranker
LONGEST = 2000  # characters of a question


class Answer(NamedTuple):
    """cache: the header of the question's embedding."""

    hits: list[Hit]
    seconds: float
    cache: str | None
    reranked: bool


def search(
    index: Index,
    gateway: Gateway,
    collection: str,
    question: str,
    *,
    limit: int = 10,
    path: str = "",
    language: str = "",
    rerank: bool = False,
) -> Answer:
    text = question.strip()[:LONGEST]
    if not text:
        raise Problem("Write what you look for.")
    begun = time.monotonic()
    reply = answered(lambda: gateway.embed([text]))
    hits = index.search(collection, reply.vectors[0], limit * CANDIDATES if rerank else limit, path, language)
    if rerank and hits:
        scores = answered(lambda: gateway.rerank(text, [hit.entry.text for hit in hits]))
        hits = [hit._replace(score=score) for hit, score in zip(hits, scores, strict=True)]
        hits.sort(key=lambda hit: -hit.score)
    return Answer(hits[:limit], time.monotonic() - begun, reply.cache, rerank)
