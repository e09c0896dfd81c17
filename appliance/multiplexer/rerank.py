"""RerankStream: one text a message, one ranking of all of them.

TEI's own RerankStream never answers (1.9), so the messages are gathered here and sent as Rerank requests that are as
large as TEI takes them. The replies are merged into one ranking.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError

from appliance.core.budget import GATHERED, MESSAGE
from appliance.core.problems import invalid
from appliance.core.routing import Target
from appliance.drivers.memory import Reservation
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.batch_run import Generations, Replaced
from appliance.multiplexer.relay import RefusalsAsStatus, Relay
from appliance.multiplexer.whole_stream import WholeStream
from appliance.wire.methods import METHODS, Method
from appliance.wire.tei.v1 import tei_pb2 as tei

RERANK = next(method for method in METHODS if method.name == "Rerank")
DEFAULT_LARGEST = 32
INFO = next(method for method in METHODS if method.name == "Info")


def handler(relay: Relay, method: Method, addressing: Addressing) -> grpc.RpcMethodHandler:
    def gather(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        counted, reservation = relay.metering.counting(method.name, context), relay.reserve.reservation()
        with counted as call, RefusalsAsStatus(context), relay.stream_permit(), reservation:
            asked, messages = gather_messages(method, addressing, requests, context, reservation)
            call.target, whole = asked, WholeStream(context)
            expects = relay.cached.cache.refuse_unexpected(asked, context)
            info = relay.attempts.unary(INFO, asked, b"", context, call).message
            target = Target(instance_name=call.instance, here=asked.here)  # others of its model may take fewer
            watched = asked if whole.is_asked_for else target  # what must not be replaced meanwhile
            replies = list[UnaryReply]()
            generations: Generations | None = None
            while generations != (now := relay.attempts.pool.generations(watched)):  # one ranking is of one generation
                if generations is not None:
                    info = relay.attempts.unary(INFO, target, b"", context, call).message
                generations, largest = now, largest_batch(info)
                replies = [
                    relay.attempts.unary(RERANK, target, piece.SerializeToString(), context, call)
                    for piece in cut_requests(messages, largest)
                ]
            if whole.is_asked_for and call.instance not in dict(generations):  # an alias names another one now
                raise Replaced(asked)
            whole.begin(asked, generations)
            for reply in replies:
                relay.cached.cache.refuse_changed(expects, reply.replica)
            call.texts = len(messages)
            rankings = [tei.RerankResponse.FromString(reply.message) for reply in replies]
            return merge_rankings(rankings, largest).SerializeToString()

    return grpc.stream_unary_rpc_method_handler(gather)


def largest_batch(info: bytes) -> int:
    """Texts of one Rerank call, as the replica's Info has them."""
    try:
        return tei.InfoResponse.FromString(info).max_client_batch_size or DEFAULT_LARGEST
    except DecodeError:
        return DEFAULT_LARGEST


def gather_messages(
    method: Method,
    addressing: Addressing,
    requests: Iterator[bytes],
    context: grpc.ServicerContext,
    reservation: Reservation,
) -> tuple[Target, list[tei.RerankStreamRequest]]:
    first = next(requests, None)
    if first is None:
        raise invalid("Empty stream: send at least one message")
    target, inner = addressing.first(method, first, context)
    reservation.grow(GATHERED * len(inner) + MESSAGE, bounded=False)
    inners = [inner]
    for number, raw in enumerate(requests, start=1):
        reservation.grow(GATHERED * len(raw) + MESSAGE, bounded=False)
        inners.append(addressing.following(raw, target, number))
    try:
        messages = [tei.RerankStreamRequest.FromString(inner) for inner in inners]
    except DecodeError:
        raise invalid("A request of the stream is not a RerankStreamRequest of tei.v1") from None
    if any(message.query != messages[0].query for message in messages):
        raise invalid("All messages of a RerankStream must have the same query")
    return target, messages


def cut_requests(messages: list[tei.RerankStreamRequest], largest: int) -> Iterator[tei.RerankRequest]:
    """Rerank requests over all texts, ``largest`` each; the first message decides the options, as in TEI."""
    first = messages[0]
    for begin in range(0, len(messages), largest):
        yield tei.RerankRequest(
            query=first.query,
            texts=[message.text for message in messages[begin : begin + largest]],
            truncate=first.truncate,
            raw_scores=first.raw_scores,
            return_text=first.return_text,
            truncation_direction=first.truncation_direction,
        )


def merge_rankings(rankings: list[tei.RerankResponse], largest: int) -> tei.RerankResponse:
    """One ranking; of equal scores the later text first, as in each reply. Counts and times are added up."""
    whole = tei.RerankResponse()
    for number, ranking in enumerate(rankings):
        for rank in ranking.ranks:
            rank.index += number * largest
            whole.ranks.append(rank)
        for field, value in ranking.metadata.ListFields():
            setattr(whole.metadata, field.name, getattr(whole.metadata, field.name) + value)
    whole.ranks.sort(key=lambda rank: (-rank.score, -rank.index))
    return whole
