"""Ranking texts against a query, also when they are more than TEI takes in one call."""

from __future__ import annotations

from typing import Any

from appliance.core import fields as check
from appliance.gateway import multiplexer_replies
from appliance.gateway.multiplexer_calls import OF_OBJECTS, LazyRequests, MultiplexerCalls
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

ONE_CALL = 32  # texts of one Rerank call, unless the instance was given another max_client_batch_size: TEI's default


def rank_texts(calls: MultiplexerCalls, query: str, texts: list[str], **options: Any) -> list[tei.Rank]:
    """Every text's index and score, best first; of equal scores the later text first, as TEI has it."""
    target = calls.selection.target
    limit = check.decimal(calls.selection.flag("--max-client-batch-size") or "")
    if len(texts) <= (ONE_CALL if limit is None else limit):
        request = mux.RerankRequest(target=target, request=tei.RerankRequest(query=query, texts=texts, **options))
        (raw,) = calls.replies("Rerank", [request.SerializeToString()])
    else:

        def request_for(text: str) -> bytes:
            inner = tei.RerankStreamRequest(query=query, text=text, **options)
            return mux.RerankStreamRequest(target=target, request=inner).SerializeToString()

        raw = calls.channels.gather("RerankStream", LazyRequests(request_for, texts), calls.watch, calls.metadata)
        calls.reserve(OF_OBJECTS * len(raw))
    reply = multiplexer_replies.ranks(raw, len(texts))
    calls.usage.add(reply.metadata, len(texts))
    return list(reply.ranks)
