"""A query against many texts, however many TEI takes at once."""

from __future__ import annotations

from typing import Any

from appliance.core import fields as check
from appliance.gateway import replies
from appliance.gateway.embedding import OF_OBJECTS, Embedder, WhenAsked
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

ONE_CALL = 32  # texts of one Rerank call, unless the instance was given another max_client_batch_size: TEI's default


def ranked(embedder: Embedder, query: str, texts: list[str], **options: Any) -> list[tei.Rank]:
    """Every text's index and score, best first; of equal scores the later text first, as TEI has it."""
    target = embedder.choice.target
    limit = check.decimal(embedder.choice.flag("--max-client-batch-size") or "")
    if len(texts) <= (ONE_CALL if limit is None else limit):
        request = mux.RerankRequest(target=target, request=tei.RerankRequest(query=query, texts=texts, **options))
        (raw,) = embedder.replies("Rerank", [request.SerializeToString()])
    else:

        def of(text: str) -> bytes:
            inner = tei.RerankStreamRequest(query=query, text=text, **options)
            return mux.RerankStreamRequest(target=target, request=inner).SerializeToString()

        raw = embedder.upstream.gather("RerankStream", WhenAsked(of, texts), embedder.watch)
        embedder.book(OF_OBJECTS * len(raw))
    reply = replies.ranks(raw, len(texts))
    embedder.spent.add(reply.metadata, len(texts))
    return list(reply.ranks)
