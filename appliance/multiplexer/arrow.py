"""EmbedArrow and EmbedSparseArrow, unary and streaming: n rows in, n rows out, in order, always.

Texts never become Python strings and vectors never Python floats: distinct texts are UTF-8 bytes put behind a protobuf
tag, and the packed floats of each reply are copied into their row of one buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from appliance.core.budget import ANSWERED, MIB
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.routing import Target
from appliance.drivers.memory import Reserve
from appliance.multiplexer.attempts import time_left
from appliance.multiplexer.batch import BatchJob, BatchRunner, RowError, RowFailed
from appliance.multiplexer.metering import CallRecord, Metering
from appliance.multiplexer.relay import refusals_as_status
from appliance.multiplexer.replica_pool import ReplicaPool
from appliance.multiplexer.usage import Usage
from appliance.wire import arrow, validity, vectors
from appliance.wire.arrow import Texts
from appliance.wire.envelope import ROW_KEY, target_of
from appliance.wire.tei.v1 import tei_pb2 as tei
from appliance.wire.tei_multiplexer.v1 import multiplexer_pb2 as mux

EXPANSION = 8  # Arrow data may expand to this many times the largest message
NOOP_DIM = 384
SPARSE_ROW = 64  # bytes, beside its entries
ON_ERROR = "x-arrow-on-error"
Book = Callable[..., None]  # `Reservation.grow`


class Arrow:
    """Handlers of the four Arrow RPCs. max_message_bytes bounds requests and replies alike."""

    def __init__(
        self,
        pool: ReplicaPool,
        runner: BatchRunner,
        metering: Metering,
        max_message_bytes: int,
        stream_permit: Callable[[], Any],
        reserve: Reserve,
    ) -> None:
        self.metering = metering
        self.reserve = reserve
        self.stream_permit = stream_permit  # a context manager that holds one permit for streams
        self.pool = pool
        self.runner = runner
        self.max_message_bytes = max_message_bytes

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        handlers = {}
        for name, kind in (("EmbedArrow", DenseCollector), ("EmbedSparseArrow", SparseCollector)):
            handlers[name] = self.unary(name, kind)
            handlers[f"{name}Stream"] = self.stream(f"{name}Stream", kind)
        return handlers

    def unary(self, name: str, kind: type[DenseCollector] | type[SparseCollector]) -> grpc.RpcMethodHandler:
        def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
            with (
                self.metering.counting(name, context) as call,
                refusals_as_status(context),
                row_failure_as_status(context),
            ):
                request = parse(kind.request, raw)
                call.target = target_in(request)
                return self.answer(kind, request, call.target, context, call)

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, name: str, kind: type[DenseCollector] | type[SparseCollector]) -> grpc.RpcMethodHandler:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with (
                self.metering.counting(name, context) as call,
                refusals_as_status(context),
                row_failure_as_status(context),
                self.stream_permit(),
            ):
                target = None
                for raw in requests:
                    request = parse(kind.request, raw)
                    other = target_in(request)
                    if target and other and other != target:
                        raise invalid(
                            f"A later message asks for {other}, the first for {target}: one stream, one target"
                        )
                    call.target = target = target or other
                    yield self.answer(kind, request, target, context, call)
                if target is None and context.is_active():
                    raise invalid("Empty stream: send at least one message")

        return grpc.stream_stream_rpc_method_handler(handle)

    def answer(
        self, kind: Any, request: Any, target: Target | None, context: grpc.ServicerContext, call: CallRecord
    ) -> bytes:
        with self.reserve.reservation() as reservation:
            return self.compute(kind, request, target, context, call, reservation.grow)

    def compute(
        self,
        kind: Any,
        request: Any,
        target: Target | None,
        context: grpc.ServicerContext,
        call: CallRecord,
        book: Book,
    ) -> bytes:
        texts = arrow.read_texts(request.arrow_ipc, EXPANSION * self.max_message_bytes, book=book)
        if request.noop:
            if (size := len(texts) * kind.noop_row_bytes) > self.max_message_bytes:
                raise reply_too_large(size, self.max_message_bytes)
            book(ANSWERED * size)
            return self.refuse_large(kind.reply(arrow_ipc=kind.noop(len(texts))).SerializeToString())
        if target is None:
            raise invalid("Missing target: set target.instance_name, target.model_id or target.instance_index")
        metadata = dict(context.invocation_metadata())
        left = time_left(context)
        caller_left = threading.Event()
        if not context.add_callback(caller_left.set):
            caller_left.set()
        sink = kind.for_request(request, texts, self.max_message_bytes, book)
        job = BatchJob(
            target=target,
            method=kind.method,
            path=kind.path,
            requests=requests_of(texts, kind.suffix(request)),
            lengths=[len(text) for text in texts.unique],
            on_answer=sink.accept,
            deadline=None if left is None else time.monotonic() + left,
            gone=caller_left.is_set,
            keep_errors=metadata.get(ON_ERROR) == "null",
        )
        began = time.monotonic()
        if not texts.unique and kind is DenseCollector:
            self.learn_width(sink, job, kind.suffix(request))
        try:
            with call.waiting():
                failed = self.runner.run(job) if texts.unique else {}
            call.texts += len(texts)
        except RowFailed as failure:
            row = int(np.flatnonzero(texts.row == failure.row)[0])
            raise InputRowFailed(row, failure.error) from None
        if texts.unique and len(failed) == len(texts.unique) and kind is DenseCollector:
            self.learn_width(sink, job, kind.suffix(request))
        reply = kind.reply(
            arrow_ipc=sink.write(texts, failed, job.keep_errors),
            metadata=sink.usage.total(texts.row, time.monotonic() - began),
        )
        return self.refuse_large(reply.SerializeToString())

    def learn_width(self, sink: DenseCollector, job: BatchJob, suffix: bytes) -> None:
        """Without one answered row the width of the vectors is unknown: ask for one."""
        try:
            self.runner.run(width_job(job, sink, suffix))
        except RowFailed as failure:
            raise InputRowFailed(0, failure.error) from None

    def refuse_large(self, reply: bytes) -> bytes:
        if len(reply) > self.max_message_bytes:
            raise reply_too_large(len(reply), self.max_message_bytes)
        return reply


def width_job(job: BatchJob, sink: DenseCollector, suffix: bytes) -> BatchJob:
    request = vectors.length_delimited(1, b"a") + suffix

    def learn(row: int, reply: bytes) -> None:
        sink.learn(len(vectors.unpack(reply)[0]))

    return BatchJob(job.target, job.method, job.path, [request], [1], learn, job.deadline, job.gone, False)


class InputRowFailed(Exception):
    def __init__(self, row: int, error: RowError) -> None:
        super().__init__(error.details)
        self.row = row
        self.error = error


class row_failure_as_status:
    """End the call with a failed row's own code, its number in the message and in the trailing metadata."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputRowFailed):
            self.context.set_trailing_metadata(((ROW_KEY, str(error.row)),))
            self.context.abort(error.error.code, f"Row {error.row}: {error.error.details}")


def parse(message: Any, raw: bytes) -> Any:
    try:
        return message.FromString(raw)
    except Exception:
        raise invalid(f"The request is not a {message.__name__} of tei_multiplexer.v1") from None


def target_in(request: Any) -> Target | None:
    return target_of(request.target) if request.HasField("target") else None


def requests_of(texts: Texts, suffix: bytes) -> list[bytes]:
    """TEI's request of each distinct text: `inputs` is field 1 of EmbedRequest and of EmbedSparseRequest."""
    return [vectors.length_delimited(1, text) + suffix for text in texts.unique]


def reply_too_large(size: int, limit: int) -> Problem:
    return Problem(
        Kind.EXHAUSTED,
        "TOO_LARGE",
        f"The reply would have about {size} bytes, and grpc_max_message_size_mb allows {limit}: send fewer rows a "
        "call, or use EmbedArrowStream",
    )


@dataclass
class DenseCollector:
    """Collects vectors: row i of ``found`` belongs to distinct text i."""

    request = mux.EmbedArrowRequest
    reply = mux.EmbedArrowResponse
    method, path = "Embed", "/tei.v1.Embed/EmbedStream"
    noop_row_bytes = 4 * NOOP_DIM

    distinct: int
    rows: int
    limit: int
    normalized: bool
    book: Book
    found: np.ndarray | None = None

    @classmethod
    def for_request(cls, request: mux.EmbedArrowRequest, texts: Texts, limit: int, book: Book) -> DenseCollector:
        return cls(len(texts.unique), len(texts), limit, request.normalize, book)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.usage = Usage(self.distinct)

    @staticmethod
    def suffix(request: mux.EmbedArrowRequest) -> bytes:
        options = tei.EmbedRequest(
            truncate=request.truncate,
            normalize=request.normalize,
            truncation_direction=request.truncation_direction,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
            dimensions=request.dimensions if request.HasField("dimensions") else None,
        )
        return options.SerializeToString()

    @staticmethod
    def noop(rows: int) -> bytes:
        return arrow.dense_reply(np.zeros((rows, NOOP_DIM), np.float32), np.arange(rows), None)

    def accept(self, row: int, reply: bytes) -> None:
        vector, rest = vectors.unpack(reply)
        if flaw := validity.vector_flaw(vector, self.normalized):
            raise ValueError(flaw)
        if self.found is None:
            self.learn(len(vector))
        assert self.found is not None
        self.found[row] = vector  # raises ValueError for another width
        self.usage.note(row, tei.EmbedResponse.FromString(rest).metadata)

    def learn(self, width: int) -> None:
        """The first answer tells the width, and whether the reply can be sent at all."""
        if (size := self.rows * width * 4) > self.limit:
            raise reply_too_large(size, self.limit)
        with self.lock:
            if self.found is None:
                self.book(ANSWERED * max(self.rows, self.distinct) * width * 4)
                self.found = np.zeros((self.distinct, width), np.float32)

    def write(self, texts: Texts, failed: dict[int, RowError], keep_errors: bool) -> bytes:
        assert self.found is not None
        row, errors = without_failed(texts, failed, keep_errors)
        return arrow.dense_reply(self.found, row, errors)


@dataclass
class SparseCollector:
    """Collects sparse vectors as (indices, values), one entry for each distinct text."""

    request = mux.EmbedSparseArrowRequest
    reply = mux.EmbedSparseArrowResponse
    method, path = "EmbedSparse", "/tei.v1.Embed/EmbedSparseStream"
    noop_row_bytes = 4 + 3 * 8

    distinct: int
    rows: int
    limit: int
    book: Book

    @classmethod
    def for_request(cls, request: mux.EmbedSparseArrowRequest, texts: Texts, limit: int, book: Book) -> SparseCollector:
        return cls(len(texts.unique), len(texts), limit, book)

    def __post_init__(self) -> None:
        self.found: list[Any] = [None] * self.distinct
        self.lock = threading.Lock()
        self.unused_bytes = 0  # booked, and not used yet
        self.usage = Usage(self.distinct)

    @staticmethod
    def suffix(request: mux.EmbedSparseArrowRequest) -> bytes:
        options = tei.EmbedSparseRequest(
            truncate=request.truncate,
            truncation_direction=request.truncation_direction,
            prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        )
        return options.SerializeToString()

    @staticmethod
    def noop(rows: int) -> bytes:
        indices = np.arange(rows)[:, None] + np.array([0, 100, 200])
        values = np.tile(np.array([1.0, 0.5, 0.25], np.float32), rows)
        return arrow.flat_sparse_reply(np.full(rows, 3), indices.ravel(), values, np.zeros(rows, bool), None)

    def accept(self, row: int, reply: bytes) -> None:
        answer = tei.EmbedSparseResponse.FromString(reply)
        self.usage.note(row, answer.metadata)
        entries = answer.sparse_embeddings
        self.book_entries(ANSWERED * (SPARSE_ROW + 8 * len(entries)))
        indices = np.array([entry.index for entry in entries], np.uint32)
        values = np.array([entry.value for entry in entries], np.float32)
        if flaw := validity.vector_flaw(values, normalized=False):
            raise ValueError(flaw)
        self.found[row] = (indices, values)

    def book_entries(self, size: int) -> None:
        with self.lock:
            if size > self.unused_bytes:
                self.book(size + MIB, False)
                self.unused_bytes += size + MIB
            self.unused_bytes -= size

    def write(self, texts: Texts, failed: dict[int, RowError], keep_errors: bool) -> bytes:
        row, errors = without_failed(texts, failed, keep_errors)
        entries = np.array([len(found[0]) if found else 0 for found in self.found] + [0], np.int64)  # of row -1: none
        if (size := 4 * len(row) + 8 * int(entries[row].sum())) > self.limit:
            raise reply_too_large(size, self.limit)
        return arrow.sparse_reply([self.found[at] if at >= 0 else None for at in row.tolist()], errors)


def without_failed(
    texts: Texts, failed: dict[int, RowError], keep_errors: bool
) -> tuple[np.ndarray, list[str | None] | None]:
    """(row -> distinct text or -1, error of each row): a failed text is null in all its rows."""
    if not keep_errors:
        return texts.row, None
    words = {at: f"{error.code.name}: {error.details}" for at, error in failed.items()}
    errors = [words.get(at) for at in texts.row.tolist()]
    return np.where(np.isin(texts.row, list(failed)), -1, texts.row), errors
