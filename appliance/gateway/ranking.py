"""Ranking texts against a query, also when they are more than TEI takes in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.core import fields as check
from appliance.gateway import multiplexer_replies
from appliance.gateway.multiplexer_calls import OF_OBJECTS, LazyRequests, MultiplexerCalls
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

ONE_CALL = 32  # texts of one Rerank call, unless the instance was given another max_client_batch_size: TEI's default


def rank_texts(calls: MultiplexerCalls, query: str, texts: list[str], **options: Any) -> list[tei.Rank]:
    """Every text's index and score, best first; of equal scores the later text first, as TEI has it.

    Raises: Refusal.
    """
    reply = ranking(calls, query, texts, None, options)
    calls.usage.add(reply.metadata, len(texts))
    return list(reply.ranks)


def rank_for_each(
    calls: MultiplexerCalls, texts_of: Mapping[str, list[str]], **options: Any
) -> dict[str, list[tei.Rank]]:
    """As `rank_texts`, for each query and its texts: all of one generation of the instance. Raises: Refusal."""
    whole = WholeAnswer(calls.reserve) if len(texts_of) > 1 else None

    def ask() -> dict[str, tei.RerankResponse]:
        return {query: ranking(calls, query, texts, whole, options) for query, texts in texts_of.items()}

    replies = whole.tried(ask) if whole else ask()
    for query, reply in replies.items():
        calls.usage.add(reply.metadata, len(texts_of[query]))
    return {query: list(reply.ranks) for query, reply in replies.items()}


def ranking(
    calls: MultiplexerCalls, query: str, texts: list[str], whole: WholeAnswer | None, options: Mapping[str, Any]
) -> tei.RerankResponse:
    """whole: the answer of which it is a part."""
    target = calls.selection.target
    limit = check.decimal(calls.selection.flag("--max-client-batch-size") or "")
    if not whole and len(texts) <= (ONE_CALL if limit is None else limit):
        request = mux.RerankRequest(target=target, request=tei.RerankRequest(query=query, texts=texts, **options))
        (raw,) = calls.replies("Rerank", [request.SerializeToString()])
    else:

        def request_for(text: str) -> bytes:
            inner = tei.RerankStreamRequest(query=query, text=text, **options)
            return mux.RerankStreamRequest(target=target, request=inner).SerializeToString()

        requests = LazyRequests(request_for, texts)
        raw = calls.channels.gather("RerankStream", requests, calls.watch, calls.metadata, whole)
        (whole.book if whole else calls.reserve)(OF_OBJECTS * len(raw))
    return multiplexer_replies.ranks(raw, len(texts))
