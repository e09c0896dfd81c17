"""RerankStream: one text a message, one ranking of all of them.

TEI's own RerankStream never answers (1.9), so the stream is gathered here and asked as Rerank, in pieces that TEI
takes, which are ranked together afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError

from appliance.core.budget import GATHERED, MESSAGE
from appliance.core.problems import invalid
from appliance.core.routing import Target
from appliance.drivers.memory import Held
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.relay import Relay, named
from appliance.wire.methods import METHODS, Method
from appliance.wire.tei.v1 import tei_pb2 as tei

RERANK = next(method for method in METHODS if method.name == "Rerank")
TEIS_DEFAULT = 32
INFO = next(method for method in METHODS if method.name == "Info")


def handler(relay: Relay, method: Method, addressing: Addressing) -> grpc.RpcMethodHandler:
    def gather(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        counted, held = relay.metering.over(method.name, context), relay.reserve.hold()
        with counted as call, named(context), relay.stream_place(), held:
            target, messages = gathered(method, addressing, requests, context, held)
            call.target = target
            most = most_at_once(relay.unary(INFO, target, b"", context, call)[0])
            asked = [
                relay.unary(RERANK, target, piece.SerializeToString(), context, call)
                for piece in pieces(messages, most)
            ]
            call.texts = len(messages)
            replies = [tei.RerankResponse.FromString(reply) for reply, _ in asked]
            return merged(replies, most).SerializeToString()

    return grpc.stream_unary_rpc_method_handler(gather)


def most_at_once(told: bytes) -> int:
    """Texts of one Rerank call, as the replica's Info has them."""
    try:
        return tei.InfoResponse.FromString(told).max_client_batch_size or TEIS_DEFAULT
    except DecodeError:
        return TEIS_DEFAULT


def gathered(
    method: Method, addressing: Addressing, requests: Iterator[bytes], context: grpc.ServicerContext, held: Held
) -> tuple[Target, list[tei.RerankStreamRequest]]:
    first = next(requests, None)
    if first is None:
        raise invalid("Empty stream: send at least one message")
    target, inner = addressing.first(method, first, context)
    held.grow(GATHERED * len(inner) + MESSAGE, bounded=False)
    inners = [inner]
    for number, raw in enumerate(requests, start=1):
        held.grow(GATHERED * len(raw) + MESSAGE, bounded=False)
        inners.append(addressing.following(raw, target, number))
    try:
        messages = [tei.RerankStreamRequest.FromString(inner) for inner in inners]
    except DecodeError:
        raise invalid("A request of the stream is not a RerankStreamRequest of tei.v1") from None
    if any(message.query != messages[0].query for message in messages):
        raise invalid("All messages of a RerankStream must have the same query")
    return target, messages


def pieces(messages: list[tei.RerankStreamRequest], most: int) -> Iterator[tei.RerankRequest]:
    """Rerank requests over all texts, ``most`` each; the first message decides the options, as in TEI."""
    first = messages[0]
    for begin in range(0, len(messages), most):
        yield tei.RerankRequest(
            query=first.query,
            texts=[message.text for message in messages[begin : begin + most]],
            truncate=first.truncate,
            raw_scores=first.raw_scores,
            return_text=first.return_text,
            truncation_direction=first.truncation_direction,
        )


def merged(replies: list[tei.RerankResponse], most: int) -> tei.RerankResponse:
    """One ranking; of equal scores the later text first, as in each reply. Counts and times are added up."""
    whole = tei.RerankResponse()
    for number, reply in enumerate(replies):
        for rank in reply.ranks:
            rank.index += number * most
            whole.ranks.append(rank)
        for field, value in reply.metadata.ListFields():
            setattr(whole.metadata, field.name, getattr(whole.metadata, field.name) + value)
    whole.ranks.sort(key=lambda rank: (-rank.score, -rank.index))
    return whole
