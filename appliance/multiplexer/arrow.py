"""EmbedArrow, EmbedSparseArrow and EmbedAllArrow, unary and streaming: n rows in, n rows out, in order, always.

Equal rows have one text, which is computed once. Texts never become Python strings: they are UTF-8 bytes that are put
behind a protobuf tag. `collectors` keeps the answers, `batch` spreads the texts over the replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grpc
import numpy as np

from appliance.core.budget import ANSWERED
from appliance.core.problems import Problem, invalid, quoted
from appliance.core.routing import Target, missing_target
from appliance.drivers.grpccalls import UNREADABLE, readable
from appliance.drivers.memory import Reservation, Reserve
from appliance.multiplexer.batch import BatchRunner
from appliance.multiplexer.batch_run import BatchJob, Generations, Replaced, TextFailure
from appliance.multiplexer.cached_batches import CacheCounts, CachedBatch, CachedRunner
from appliance.multiplexer.caller import REPLICA_AWAY, metadata_for_peer, time_left
from appliance.multiplexer.collectors import Book, DenseCollector, SparseCollector, TokensCollector, reply_too_large
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.embedding_cache import EmbeddingCache, Mode
from appliance.multiplexer.inline_batches import in_thread
from appliance.multiplexer.joined_call import may_block, scheduler_of
from appliance.multiplexer.metering import CallRecord, Metering
from appliance.multiplexer.relay import RefusalsAsStatus
from appliance.multiplexer.whole_stream import WholeStream
from appliance.wire import arrow, vectors
from appliance.wire.arrow import Rows
from appliance.wire.envelope import (
    CACHE_KEY,
    COMBINED_KEY,
    DO_NOT_WAIT,
    IS_COMBINED,
    NULL_ROWS,
    ON_ERROR_KEY,
    ROW_KEY,
    ROW_USAGE_KEY,
    WAIT_KEY,
    target_from_message,
)

# What is read and written here holds up others of the thread: so many rows take about as long as four single calls.
INLINE = ("EmbedArrow", "EmbedSparseArrow")
INLINE_ROWS, INLINE_BYTES = 16, 16 * 1024
INLINE_BOOKED = 2**22
MOST_COMBINED = 64  # rows of a combined call: what each cost is told in one line of metadata
EXPANSION = 8  # Arrow data may expand to this many times the largest message
BLANK_PNG = bytes.fromhex(  # one black pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)
Collector = type[DenseCollector] | type[SparseCollector] | type[TokensCollector]
COLLECTORS: dict[str, Collector] = {
    "EmbedArrow": DenseCollector,
    "EmbedSparseArrow": SparseCollector,
    "EmbedAllArrow": TokensCollector,
}


class Reply(NamedTuple):
    """message: serialized. generations: of the instances that it is from, none where nobody was asked."""

    message: bytes
    generations: Generations = ()


class ArrowHandlers:
    """Handlers of the six Arrow RPCs. max_message_bytes bounds requests and replies alike.

    stream_permit: a context manager that has the permit of one stream.
    """

    def __init__(
        self,
        runner: BatchRunner,
        metering: Metering,
        max_message_bytes: int,
        stream_permit: Callable[[], Any],
        reserve: Reserve,
        cache: EmbeddingCache,
    ) -> None:
        self.runner = CachedRunner(runner, cache)
        self.metering = metering
        self.max_message_bytes = max_message_bytes
        self.stream_permit = stream_permit
        self.reserve = reserve

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        handlers = {}
        for name, kind in COLLECTORS.items():
            handlers[name] = self.unary(name, kind)
            handlers[f"{name}Stream"] = self.stream(f"{name}Stream", kind)
        return handlers

    def inline(self) -> dict[str, Callable[[bytes, Any], bytes]]:
        """(message, context) -> reply, for small batches in the thread of the unary server."""
        return {name: self.unary(name, COLLECTORS[name]).unary_unary for name in INLINE}

    def unary(self, name: str, kind: Collector) -> grpc.RpcMethodHandler:
        def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
            with self.metering.counting(name, context) as call, RefusalsAsStatus(context):
                if len(raw) > INLINE_BYTES:
                    may_block(context)
                request = parse(kind.request, raw)
                call.target = target_of(request)
                counts = CacheCounts()
                reply = self.answer(kind, request, call.target, context, call, counts)
                context.send_initial_metadata(counts.headers())
                return reply.message

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, name: str, kind: Collector) -> grpc.RpcMethodHandler:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            counted = self.metering.counting(name, context)
            with counted as call, RefusalsAsStatus(context), self.stream_permit():
                target, counts = None, CacheCounts()
                whole = WholeStream(context)
                for raw in requests:
                    request = parse(kind.request, raw)
                    other = target_of(request)
                    if target and other and other != target:
                        raise invalid(
                            f"A later message asks for {other}, the first for {target}: one stream, one target"
                        )
                    call.target = target = target or other
                    reply = self.answer(kind, request, target, context, call, counts)
                    if target and reply.generations:
                        whole.begin(target, reply.generations)
                    yield reply.message
                if target is None and context.is_active():
                    raise invalid("Empty stream: send at least one message")
                context.set_trailing_metadata(counts.headers())

        return grpc.stream_stream_rpc_method_handler(handle)

    def answer(
        self,
        kind: Any,
        request: Any,
        target: Target | None,
        context: grpc.ServicerContext,
        call: CallRecord,
        counts: CacheCounts,
    ) -> Reply:
        """The reply to one message. Raises: Problem."""
        with self.reserve.reservation() as reservation:
            book = InlineBook(reservation) if scheduler_of(context) else reservation.grow
            rows = arrow.read_rows(request.arrow_ipc, EXPANSION * self.max_message_bytes, book=book)
            if len(rows) > INLINE_ROWS:
                may_block(context)
            if request.noop:
                reply = Reply(self.noop(kind, len(rows), book))
            else:
                reply = self.compute(kind, request, rows, target, context, call, book, counts)
            if len(reply.message) > self.max_message_bytes:
                raise reply_too_large(len(reply.message), self.max_message_bytes)
            return reply

    def noop(self, kind: Any, rows: int, book: Book) -> bytes:
        """A reply of the right size, for measurements without a replica."""
        if (size := rows * kind.noop_row_bytes) > self.max_message_bytes:
            raise reply_too_large(size, self.max_message_bytes)
        book(ANSWERED * size)
        return arrow.reply_message(kind.noop(rows))

    def compute(
        self,
        kind: Any,
        request: Any,
        rows: Rows,
        target: Target | None,
        context: grpc.ServicerContext,
        call: CallRecord,
        book: Book,
        counts: CacheCounts,
    ) -> Reply:
        """As `compute_whole`, again where the instance was replaced meanwhile: no reply has vectors of two models."""
        if target is None:
            raise missing_target()
        while True:
            before = counts.hits, counts.misses
            try:
                return self.compute_whole(kind, request, rows, target, context, call, book, counts)
            except Replaced:
                if not context.is_active():  # its deadline is over, too
                    raise
                counts.hits, counts.misses = before

    def compute_whole(
        self,
        kind: Any,
        request: Any,
        rows: Rows,
        target: Target,
        context: grpc.ServicerContext,
        call: CallRecord,
        book: Book,
        counts: CacheCounts,
    ) -> Reply:
        """Raises: Replaced."""
        collector = kind.for_request(request, rows, self.max_message_bytes, book)
        options = collector.options(request)
        job = job_of(collector, target, self.runner.runner.pool.generations(target), context)
        if job.is_combined and len(rows) > MOST_COMBINED:
            raise invalid(
                f"{COMBINED_KEY} is for {MOST_COMBINED} rows at most, and these are {len(rows)}: leave it out"
            )
        batch = CachedBatch(job, rows.texts, options, collector)
        began = time.monotonic()
        failures = self.runner.run(batch, context, call, counts) | collector.unfit() if rows.texts else {}
        job.refuse_replaced(self.runner.runner.pool.generations(target))  # what was cached may be of the next one
        if failures and not job.keep_failures:
            text, failure = next(iter(failures.items()))
            refuse_row(context, int(np.flatnonzero(rows.text_of_row == text)[0]), failure)
        if kind.has_width and len(failures) == len(rows.texts):
            if failures and (CACHE_KEY, Mode.ONLY) in context.invocation_metadata():  # nothing is computed for a width
                text, failure = next(iter(failures.items()))
                refuse_row(context, int(np.flatnonzero(rows.text_of_row == text)[0]), failure)
            content = BLANK_PNG if rows.images else b"a"
            self.learn_width(collector, job, vectors.length_delimited(1, content) + options, context)
        call.texts += len(rows)
        ipc = collector.write(rows, failures, job.keep_failures)
        if job.is_combined:
            context.set_trailing_metadata(((ROW_USAGE_KEY, collector.usage.each(rows.text_of_row)),))
            for _ in range(len(rows)):
                self.metering.meters.waits.observe(0.0)  # as of single texts that found room
        usage = collector.usage.total(rows.text_of_row, time.monotonic() - began)
        return Reply(arrow.reply_message(ipc, usage), job.generations)

    def learn_width(self, collector: Any, job: BatchJob, request: bytes, context: grpc.ServicerContext) -> None:
        """Without one answered text the width of the vectors is unknown: ask for that of a text of our own."""

        def learn(text: int, reply: bytes) -> None:
            collector.learn_width(reply)

        own = replace(job, requests=[request], lengths=[1], on_answer=learn, keep_failures=False, scheduler=None)
        run = partial(self.runner.runner.run, own)
        # What was counted and learned so far must not begin anew.
        failures = in_thread(run, job.scheduler) if job.scheduler else run()
        for failure in failures.values():
            refuse_row(context, 0, failure)


class InlineBook:
    """Books memory without waiting for it. Raises: WouldBlock."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation

    def __call__(self, size: int, bounded: bool = True) -> None:
        if self.reservation.size + size > INLINE_BOOKED:
            raise WouldBlock
        try:
            self.reservation.grow(size, bounded, wait_secs=0)
        except Problem:
            raise WouldBlock from None


def job_of(collector: Any, target: Target, generations: Generations, context: grpc.ServicerContext) -> BatchJob:
    """Without its requests: those of texts that are in the cache are never made."""
    seconds, metadata = time_left(context), context.invocation_metadata()
    return BatchJob(
        target=target,
        method=collector.method,
        path=collector.path,
        requests=(),
        lengths=(),
        on_answer=collector.accept,
        deadline=None if seconds is None else time.monotonic() + seconds,
        # Not told by a callback: a stream has one context for all of its messages, which keeps each to its end.
        caller_left=lambda: not context.is_active(),
        keep_failures=keeps_failures(metadata),
        waits=(WAIT_KEY, DO_NOT_WAIT) not in metadata,
        is_combined=(COMBINED_KEY, IS_COMBINED) in metadata,
        metadata_for_peer=metadata_for_peer(context),
        generations=generations,
        scheduler=scheduler_of(context),
    )


def keeps_failures(metadata: Any) -> bool:
    """Whether a row that fails is null. Raises: Problem for what the metadata may not say."""
    said = [value for key, value in metadata if key == ON_ERROR_KEY]
    if other := [value for value in said if value != NULL_ROWS]:
        raise invalid(f"{ON_ERROR_KEY} may be {NULL_ROWS}, or left out, not {quoted(other[0])}")
    return bool(said)


def refuse_row(context: grpc.ServicerContext, row: int, failure: TextFailure) -> NoReturn:
    """End the call with the code of a row that failed; its number is in the message and in the trailing metadata."""
    unavailable = [REPLICA_AWAY] if failure.code is grpc.StatusCode.UNAVAILABLE else []
    context.set_trailing_metadata(((ROW_KEY, str(row)), *unavailable))
    context.abort(failure.code, f"Row {row}: {failure.details}")
    raise AssertionError  # not reached: abort raises, which grpc does not declare


def parse(message: Any, raw: bytes) -> Any:
    request = readable(message.FromString)(raw)
    if request is UNREADABLE:
        raise invalid(f"The request is not a {message.__name__} of tei_multiplexer.v1")
    return request


def target_of(request: Any) -> Target | None:
    return target_from_message(request.target) if request.HasField("target") else None
