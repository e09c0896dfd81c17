"""Many texts at once: one text is one call, a list is one Arrow call, cut so that every message fits.

Vectors stay packed float32 from the multiplexer's buffers to the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from appliance.gateway import replies, tokenids
from appliance.gateway.choosing import Choice
from appliance.gateway.multiplexer_channels import Metadata, Upstream, Watch
from appliance.gateway.refusals import Reason, Refusal
from appliance.gateway.shapes import Input
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

WHOLE_ROWS = 2048  # answers up to this size are sent with their length, longer ones in pieces
# Bytes that a byte of a reply becomes until the answer is sent: as vectors and their text, or as objects of Python.
OF_VECTORS, OF_VECTORS_IN_PIECES, OF_OBJECTS = 6, 1.25, 24
OF_REPLY = {"Embed": OF_VECTORS, "EmbedSparse": OF_VECTORS, "EmbedAll": 2}  # tokens are sent text by text
WIDEST = 4096  # numbers of a vector for which a slice of rows must fit into a message

# The streaming Arrow RPC of each kind, with its messages.
Kind = tuple[str, Any, Any]
DENSE: Kind = ("EmbedArrowStream", mux.EmbedArrowRequest, mux.EmbedArrowResponse)
SPARSE: Kind = ("EmbedSparseArrowStream", mux.EmbedSparseArrowRequest, mux.EmbedSparseArrowResponse)


@dataclass
class Spent:
    """What an answer cost, for its headers: the replicas' own times and counts, and who answered."""

    instance: str
    rows: int = 0
    chars: int = 0
    tokens: int = 0
    total_ns: int = 0
    tokenization_ns: int = 0  # sums over rows; `mean` divides
    queue_ns: int = 0
    inference_ns: int = 0
    decoded: bool = False  # from token ids
    began: float = field(default_factory=time.monotonic)

    def add(self, told: tei.Metadata, rows: int = 1) -> None:
        self.rows += rows
        self.chars += told.compute_chars
        self.tokens += told.compute_tokens
        self.total_ns += told.total_time_ns
        self.tokenization_ns += told.tokenization_time_ns * rows
        self.queue_ns += told.queue_time_ns * rows
        self.inference_ns += told.inference_time_ns * rows

    def mean_ms(self, nanoseconds: int) -> float:
        return nanoseconds / max(1, self.rows) / 1e6


class Embedder:
    """Embeds for one request. watch: see `Upstream.stream`; book: `Place.book`, for what replies take."""

    def __init__(self, upstream: Upstream, choice: Choice, watch: Watch, book: Callable[..., None]) -> None:
        self.book = book
        self.upstream = upstream
        self.choice = choice
        self.watch = watch
        self.spent = Spent(choice.names)

    def texts(self, inputs: Sequence[Input]) -> list[str]:
        """Token ids become the text that they spell.

        gRPC takes no ids, so their special tokens are dropped here and set again by the tokenizer: TEI itself does so
        when a prompt is asked for.
        """
        places = [at for at, entry in enumerate(inputs) if not isinstance(entry, str)]
        if not places:
            return list(inputs)  # type: ignore[arg-type]
        tokenids.refuse_where_not_taken(self.choice)
        given = [(at, inputs[at]) for at in places]
        tokenids.refuse_unknown(self.choice, given, several=len(inputs) > 1)  # type: ignore[arg-type]
        self.spent.decoded = True
        requests = [
            mux.DecodeRequest(
                target=self.choice.target,
                request=tei.DecodeRequest(ids=inputs[at], skip_special_tokens=True),  # type: ignore[arg-type]
            ).SerializeToString()
            for at in places
        ]
        found = list(inputs)
        with tokenids.decoding():
            decoded = list(self.replies("Decode", requests, places))
        for at, reply in zip(places, decoded, strict=True):
            found[at] = replies.message("Decode", tei.DecodeResponse, reply).text
            if not found[at]:
                raise Refusal(Reason.EMPTY, f"The token ids of input {at} spell nothing: it cannot be empty")
        return found  # type: ignore[return-value]

    def replies(self, name: str, requests: list[bytes], places: Sequence[int] = ()) -> Iterator[bytes]:
        """One reply for each request of an RPC that has both forms, unary and stream. places: see `Upstream.stream`."""
        factor = OF_REPLY.get(name, OF_OBJECTS)
        if len(requests) > 1:
            rows = [1] * len(requests)
            for reply in self.upstream.stream(f"{name}Stream", requests, rows, self.watch, places=places):
                self.book(factor * len(reply), bounded=False)
                yield reply
            return
        reply, instance = self.upstream.unary(name, requests[0])
        self.spent.instance = instance or self.spent.instance
        self.book(factor * len(reply))
        yield reply

    def dense(self, texts: list[str], **options: Any) -> list[np.ndarray]:
        """Blocks of [rows, width] float32 which together have a row for each text."""
        if len(texts) > 1:
            return replies.matrix(self.batches(DENSE, arrow_of(texts), options))
        request = mux.EmbedRequest(target=self.choice.target, request=tei.EmbedRequest(inputs=texts[0], **options))
        (reply,) = self.replies("Embed", [request.SerializeToString()])
        vector, told = replies.embedding(reply)
        self.spent.add(told)
        return [vector]

    def sparse(self, texts: list[str], **options: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(indices uint32, values float32) of each text."""
        if len(texts) > 1:
            for batch in self.batches(SPARSE, arrow_of(texts), options):
                yield from replies.entries(batch)
            return
        request = mux.EmbedSparseRequest(
            target=self.choice.target, request=tei.EmbedSparseRequest(inputs=texts[0], **options)
        )
        (raw,) = self.replies("EmbedSparse", [request.SerializeToString()])
        indices, values, told = replies.sparse_embedding(raw)
        self.spent.add(told)
        yield indices, values

    def batches(
        self, kind: Kind, column: pa.Array, options: dict[str, Any], metadata: Metadata = ()
    ) -> list[pa.RecordBatch]:
        """The replies to one Arrow call, or the one stream of them that so many texts need; all rows, in order."""
        name, request_type, reply_type = kind
        slices = list(cut(column, self.upstream.max_message_bytes))

        def request(part: pa.Array) -> bytes:
            raw: bytes = request_type(target=self.choice.target, arrow_ipc=ipc(part), **options).SerializeToString()
            return raw

        requests = WhenAsked(request, slices)
        rows = [len(part) for part in slices]
        found: list[pa.RecordBatch] = []
        factor = OF_VECTORS if len(column) <= WHOLE_ROWS else OF_VECTORS_IN_PIECES
        for raw in self.upstream.stream(name, requests, rows, self.watch, metadata):
            batch, told = replies.batch(name, reply_type, raw, rows[len(found)], sum(rows[: len(found)]))
            self.book(int(factor * batch.nbytes))
            self.spent.add(told, batch.num_rows)
            found.append(batch)
        return found


class WhenAsked(Sequence[bytes]):
    """Requests that are written when they are sent: all at once they would be a copy of all texts, and of a query for
    each of them."""

    def __init__(self, write: Callable[[Any], bytes], slices: Sequence[Any]) -> None:
        self.write = write
        self.slices = slices

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, at: Any) -> Any:
        return self.write(self.slices[at])


def arrow_of(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def cut(column: pa.Array, largest: int) -> Iterator[pa.Array]:
    """Slices whose texts and whose vectors fit into a message of ``largest`` bytes; a text is never cut."""
    most_rows = max(1, largest * 9 // 10 // (4 * WIDEST))  # the rest is for Arrow's and protobuf's own bytes
    sizes = pa.compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    begin = 0
    while begin < len(column) or begin == 0:
        fitting = int(np.searchsorted(ends, ends[begin] + largest // 2, side="right")) - 1
        end = max(begin + 1, min(fitting, begin + most_rows))
        yield column.slice(begin, end - begin)
        begin = end


def ipc(column: pa.Array) -> bytes:
    batch = pa.record_batch([column], names=["text"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
