"""The calls to the multiplexer that one HTTP request needs.

One text is one unary call; a list of texts is one Arrow call, cut so that every message fits. Vectors stay packed
float32 from the multiplexer's buffers to the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from appliance.drivers.modelfolder import Card
from appliance.gateway import multiplexer_replies, tokenids
from appliance.gateway.channel import ChannelReply, Metadata
from appliance.gateway.combined_replies import DenseReply, separate_replies
from appliance.gateway.combining import Combiner
from appliance.gateway.multiplexer_channels import MultiplexerChannels, Watch
from appliance.gateway.multiplexer_replies import SparseVector
from appliance.gateway.selection import Selection
from appliance.gateway.shapes import Input
from appliance.gateway.slices import AnswerBytes, arrow_of, cut, of_one_vector, of_token_vectors
from appliance.gateway.whole_answer import WholeAnswer
from appliance.wire import validity
from appliance.wire.envelope import (
    CACHE_KEY,
    COMBINED_KEY,
    FINGERPRINT_KEY,
    INSTANCE_KEY,
    IS_COMBINED,
    NULL_ROWS,
    ON_ERROR_KEY,
    SCOPE_KEY,
    WAIT_KEY,
)
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

WHOLE_ROWS = 2048  # answers up to this size are sent with their length, longer ones in pieces
# Bytes that a byte of a reply becomes until the answer is sent: as vectors and their text, or as objects of Python.
OF_VECTORS, OF_VECTORS_IN_PIECES, OF_OBJECTS = 6, 1.25, 24
OF_TOKENS = 2  # their vectors are sent text by text
OF_REPLY = {
    "Embed": OF_VECTORS,
    "EmbedImage": OF_VECTORS,
    "EmbedSparse": OF_VECTORS,
    "EmbedAll": OF_TOKENS,
}
COMBINED = {WAIT_KEY, SCOPE_KEY}  # what may be said of texts that travel together
LONGEST_COMBINED = 1000  # characters: a long text would keep the short ones beside it waiting


class ArrowMethod(NamedTuple):
    """A streaming Arrow RPC with its messages."""

    name: str
    request_type: Any
    reply_type: Any


DENSE = ArrowMethod("EmbedArrowStream", mux.EmbedArrowRequest, mux.EmbedArrowResponse)
TOKENS = ArrowMethod("EmbedAllArrowStream", mux.EmbedAllArrowRequest, mux.EmbedAllArrowResponse)
SPARSE = ArrowMethod("EmbedSparseArrowStream", mux.EmbedSparseArrowRequest, mux.EmbedSparseArrowResponse)


@dataclass
class ResponseUsage:
    """What an answer cost, for its headers: the times and counts that the replicas measured, and which instance
    answered. Times of tokenization, queue and inference are sums over rows."""

    instance: str
    rows: int = 0
    chars: int = 0
    tokens: int = 0
    total_ns: int = 0
    tokenization_ns: int = 0
    queue_ns: int = 0
    inference_ns: int = 0
    decoded: bool = False  # from token ids
    fingerprint: str | None = None
    cached: str | None = None  # hit, miss or bypass, of one text; or the counts of several
    began: float = field(default_factory=time.monotonic)

    def add(self, metadata: tei.Metadata, rows: int = 1) -> None:
        self.rows += rows
        self.chars += metadata.compute_chars
        self.tokens += metadata.compute_tokens
        self.total_ns += metadata.total_time_ns
        self.tokenization_ns += metadata.tokenization_time_ns * rows
        self.queue_ns += metadata.queue_time_ns * rows
        self.inference_ns += metadata.inference_time_ns * rows

    def include(self, other: ResponseUsage) -> None:
        """Of another call of the same request."""
        for name in ("rows", "chars", "tokens", "total_ns", "tokenization_ns", "queue_ns", "inference_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        names = [*filter(None, self.instance.split(", ")), *other.instance.split(", ")]
        self.instance = ", ".join(dict.fromkeys(names))

    def note(self, metadata: Mapping[str, Any]) -> None:
        """What the multiplexer says of the cache, and of who answered."""
        self.instance = metadata.get(INSTANCE_KEY) or self.instance
        self.fingerprint = metadata.get(FINGERPRINT_KEY) or self.fingerprint
        self.cached = metadata.get(CACHE_KEY) or self.cached

    def mean_ms(self, nanoseconds: int) -> float:
        return nanoseconds / max(1, self.rows) / 1e6


class MultiplexerCalls:
    """The calls of one request.

    watch: see `MultiplexerChannels.stream`; reserve: `RequestMemory.reserve`, for the memory that replies take.
    metadata: what the request says about the cache, for each call. combiner: of the texts of other requests, with which
    a single one may travel. card: of the model, where its files are here.
    """

    def __init__(
        self,
        channels: MultiplexerChannels,
        selection: Selection,
        watch: Watch,
        reserve: Callable[..., None],
        metadata: Metadata = (),
        combiner: Combiner[DenseReply] | None = None,
        card: Callable[[], Card | None] = lambda: None,
    ) -> None:
        self.card = card
        self.metadata = metadata
        self.combiner = combiner
        self.reserve = reserve
        self.channels = channels
        self.selection = selection
        self.watch = watch
        self.usage = ResponseUsage(selection.names)

    def texts(self, inputs: Sequence[Input], places: Sequence[int] = ()) -> list[str]:
        """The inputs as texts: token ids become the text that they spell. places: theirs in the request, where that has
        other inputs as well. Raises: Refusal."""
        id_lists = {at: entry for at, entry in enumerate(inputs) if not isinstance(entry, str)}
        if not id_lists:
            return list(inputs)  # type: ignore[arg-type]
        place = places or range(len(inputs))
        numbered = [(place[at], ids) for at, ids in id_lists.items()]
        ask = partial(self.replies, is_aid=True)
        texts = tokenids.texts(self.selection, numbered, ask, several=len(inputs) > 1 or bool(places))
        self.usage.decoded = True
        spelled = dict(zip(id_lists, texts, strict=True))
        return [entry if isinstance(entry, str) else spelled[at] for at, entry in enumerate(inputs)]

    def replies(
        self,
        name: str,
        requests: list[bytes],
        places: Sequence[int] = (),
        is_aid: bool = False,
        whole: WholeAnswer | None = None,
    ) -> Iterator[bytes]:
        """One reply for each request of an RPC that has both forms, unary and stream.

        places: `positions` there. is_aid: what the caller says of the cache is about another call of his. whole: the
        answer of which they are a part; they come by a stream then.
        """
        metadata = [(key, value) for key, value in self.metadata if not (is_aid and key == CACHE_KEY)]
        factor = OF_REPLY.get(name, OF_OBJECTS)
        if whole or len(requests) > 1:
            rows, book = [1] * len(requests), whole.book if whole else self.reserve
            for reply in self.channels.stream(
                f"{name}Stream", requests, rows, self.watch, metadata, places, self.usage.note, whole
            ):
                book(int(factor * len(reply)), bounded=False)
                yield reply
            return
        reply, told = self.channels.unary(name, requests[0], metadata)
        self.usage.note(told)
        self.reserve(factor * len(reply))
        yield reply

    def whole_replies(self, name: str, requests: list[bytes]) -> list[bytes]:
        """As `replies`, all of one generation of the instance. Raises: Refusal."""
        if len(requests) == 1:
            return list(self.replies(name, requests))
        whole = WholeAnswer(self.reserve)
        return whole.tried(lambda: list(self.replies(name, requests, whole=whole)))

    def dense(self, texts: list[str], whole: WholeAnswer | None = None, **options: Any) -> list[np.ndarray]:
        """Blocks of [rows, width] float32 which together have a row for each text. whole: as for `replies`."""
        if whole or len(texts) > 1:
            return multiplexer_replies.matrix(self.batches(DENSE, arrow_of(texts), options, whole=whole))
        (text,) = texts
        if self.combiner is None or not self.may_combine(text):
            reply = self.alone(text, options)
        else:
            kind = (self.selection.first.name, tuple(sorted(options.items())), tuple(self.metadata))
            reply = self.combiner.ask(
                kind, text, lambda: self.alone(text, options), lambda texts: self.together(texts, options)
            )
        self.reserve(OF_VECTORS * reply.vectors.nbytes)
        self.usage.note(reply.told)
        self.usage.add(reply.metadata)
        return [reply.vectors]

    def may_combine(self, text: str) -> bool:
        """Whether a text may travel with those of others: not by the express lane, and not where its caller says of the
        cache what is not true of all."""
        own = {key for key, _ in self.metadata} - COMBINED
        return not (self.goes_by_lane or self.selection.is_of_several or own or len(text) > LONGEST_COMBINED)

    @property
    def goes_by_lane(self) -> bool:
        """What the caller says about the cache is the multiplexer's to read."""
        return self.selection.express and not self.metadata

    def alone(self, text: str, options: dict[str, Any]) -> DenseReply:
        """The reply to one text, as a call of its own."""
        request = tei.EmbedRequest(inputs=text, **options)
        raw = mux.EmbedRequest(target=self.selection.target, request=request).SerializeToString()
        reply = self.by_lane(raw, request) if self.goes_by_lane else None
        message, told = reply or self.channels.unary("Embed", raw, self.metadata)
        vectors = multiplexer_replies.embedding(message)
        return DenseReply(vectors.values, vectors.metadata, told)

    def by_lane(self, raw: bytes, request: tei.EmbedRequest) -> ChannelReply | None:
        """The reply of the express lane, with the look at it that the multiplexer has at its own; None for a wrong one:
        the multiplexer then asks another replica, or has the words. request: within ``raw``."""
        reply = self.channels.unary("Embed", raw, express=True)
        return None if validity.inspect("Embed", request.SerializeToString(), reply.message).flaw else reply

    def together(self, texts: Sequence[str], options: dict[str, Any]) -> list[DenseReply | None]:
        """The reply to each text, of one call; None for one that failed, which is to be told alone why."""
        request = mux.EmbedArrowRequest(target=self.selection.target, arrow_ipc=ipc(arrow_of(list(texts))), **options)
        metadata = (*self.metadata, (COMBINED_KEY, IS_COMBINED), (ON_ERROR_KEY, NULL_ROWS))
        message, told = self.channels.unary("EmbedArrow", request.SerializeToString(), metadata)
        self.reserve(len(message), bounded=False)
        return separate_replies(message, told, len(texts))

    def predictions(self, messages: list[tei.PredictPairRequest]) -> list[tei.PredictResponse]:
        """The predictions for each message. Raises: Refusal."""
        target = self.selection.target
        requests = [mux.PredictPairRequest(target=target, request=each).SerializeToString() for each in messages]
        raws = self.whole_replies("PredictPair", requests)
        replies = [multiplexer_replies.predictions(raw, at) for at, raw in enumerate(raws)]
        for reply in replies:
            self.usage.add(reply.metadata)
        return replies

    def images(self, images: list[bytes], **options: Any) -> list[np.ndarray]:
        """Blocks of [rows, width] float32 which together have a row for each image."""
        return multiplexer_replies.matrix(self.batches(DENSE, pa.array(images, pa.large_binary()), options))

    def sparse(self, texts: list[str], whole: WholeAnswer | None = None, **options: Any) -> Iterator[SparseVector]:
        """The sparse vector of each text."""
        if whole or len(texts) > 1:
            for batch in self.batches(SPARSE, arrow_of(texts), options, whole=whole):
                yield from multiplexer_replies.sparse_vectors(batch)
            return
        request = mux.EmbedSparseRequest(
            target=self.selection.target, request=tei.EmbedSparseRequest(inputs=texts[0], **options)
        )
        (raw,) = self.replies("EmbedSparse", [request.SerializeToString()])
        reply = multiplexer_replies.sparse_embedding(raw)
        self.usage.add(reply.metadata)
        yield reply.vector

    def tokens(self, texts: list[str], whole: WholeAnswer | None = None, **options: Any) -> Iterator[np.ndarray]:
        """[tokens, width] float32 of each text."""
        if whole or len(texts) > 1:
            answer_bytes = of_token_vectors(self.card())
            for batch in self.batches(TOKENS, arrow_of(texts), options, answer_bytes=answer_bytes, whole=whole):
                yield from multiplexer_replies.token_matrices(batch)
            return
        request = mux.EmbedAllRequest(
            target=self.selection.target, request=tei.EmbedAllRequest(inputs=texts[0], **options)
        )
        (raw,) = self.replies("EmbedAll", [request.SerializeToString()])
        reply = multiplexer_replies.token_embeddings(raw, 0)
        self.usage.add(reply.metadata)
        yield reply.values

    def batches(
        self,
        method: ArrowMethod,
        column: pa.Array,
        options: dict[str, Any],
        metadata: Metadata = (),
        answer_bytes: AnswerBytes = of_one_vector,
        whole: WholeAnswer | None = None,
    ) -> list[pa.RecordBatch]:
        """The replies to one stream of Arrow calls; all rows, in order. whole: the answer of which they are a part;
        left out where they are all of it. Raises: Refusal."""
        slices = list(cut(column, self.channels.max_message_bytes, answer_bytes))

        def request(part: pa.Array) -> bytes:
            message = method.request_type(target=self.selection.target, arrow_ipc=ipc(part), **options)
            raw: bytes = message.SerializeToString()
            return raw

        requests = LazyRequests(request, slices)
        rows = [len(part) for part in slices]
        factor = OF_VECTORS if len(column) <= WHOLE_ROWS else OF_VECTORS_IN_PIECES
        if method is TOKENS:
            factor = OF_TOKENS
        told, answer = (*self.metadata, *metadata), whole or WholeAnswer(self.reserve)

        def ask() -> list[multiplexer_replies.BatchReply]:
            replies: list[multiplexer_replies.BatchReply] = []
            for raw in self.channels.stream(
                method.name, requests, rows, self.watch, told, on_end=self.usage.note, whole=answer
            ):
                due, before = rows[len(replies)], sum(rows[: len(replies)])
                replies.append(multiplexer_replies.batch(method.name, method.reply_type, raw, due, before))
                answer.book(int(factor * replies[-1].batch.nbytes))
            return replies

        replies = ask() if whole else answer.tried(ask)
        for reply in replies:
            self.usage.add(reply.metadata, reply.batch.num_rows)
        return [reply.batch for reply in replies]


class LazyRequests(Sequence[bytes]):
    """Requests that are serialized when they are sent: all at once they would be a copy of all texts, and of a query
    for each of them."""

    def __init__(self, serialize: Callable[[Any], bytes], parts: Sequence[Any]) -> None:
        self.serialize = serialize
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: Any) -> Any:
        return self.serialize(self.parts[at])


def ipc(column: pa.Array) -> bytes:
    batch = pa.record_batch([column], names=["image" if pa.types.is_large_binary(column.type) else "text"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
