"""Streams of texts to embed, some of them in the cache and some not; the replies come in the order of the requests.

A thread reads the requests. Each takes a slot: what is in the cache has its reply there, everything else goes on to the
replicas as one stream of its own (`streams`), whose replies come in the order of those slots. So a text that is in the
cache waits only for those before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import NamedTuple

import grpc

from appliance.core.cachekey import TASKS, CachedEmbedding, Task
from appliance.core.problems import Kind, Problem, invalid
from appliance.core.routing import Target
from appliance.drivers.grpccalls import abort
from appliance.drivers.memory import Reservation
from appliance.multiplexer import cached_replies
from appliance.multiplexer.addressing import Addressing
from appliance.multiplexer.batch_run import Generations
from appliance.multiplexer.cached_calls import refuse_only
from appliance.multiplexer.embedding_cache import CachePlan, EmbeddingCache
from appliance.multiplexer.joined_call import CallEnded, JoinedCall
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.resend_buffer import ResendBuffer
from appliance.multiplexer.streams import Streams
from appliance.multiplexer.whole_stream import WholeStream
from appliance.wire.envelope import CACHE_BYPASS, CACHE_HIT, CACHE_KEY, CACHE_MISS
from appliance.wire.methods import Method

IDLE_SECS = 0.5
READ_AHEAD = 64  # requests that were read and are not answered
POLL_SECS = 0.5


class Unwrapped:
    """`Addressing` of messages whose target has been read."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def first(self, method: Method, raw: bytes, context: grpc.ServicerContext) -> tuple[Target, bytes]:
        return self.target, raw

    def following(self, raw: bytes, target: Target, number: int) -> bytes:
        return raw


class StreamSlot(NamedTuple):
    """One request of the stream. key: empty where nothing is kept; entry: None for what is not in the cache.

    problem: why nothing follows.
    """

    key: bytes = b""
    entry: CachedEmbedding | None = None
    problem: Problem | None = None


class CachedStreams:
    """`Streams.replies` with the cache before it."""

    def __init__(self, streams: Streams, cache: EmbeddingCache) -> None:
        self.streams = streams
        self.cache = cache

    def replies(
        self,
        method: Method,
        addressing: Addressing,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        reservation: Reservation,
        call: CallRecord,
    ) -> Iterator[bytes]:
        """The replies in order. A failure ends the caller's call. Raises: Problem."""
        first = next(requests, None)
        if first is None:
            raise invalid("Empty stream: send at least one message")
        call.target, inner = addressing.first(method, first, context)
        name = method.name.removesuffix("Stream")
        is_cacheable = name in TASKS
        while True:
            generations = self.streams.pool.generations(call.target)
            plan = self.cache.plan(call.target, context) if is_cacheable else None
            if generations == self.streams.pool.generations(call.target):
                break  # else it is not known of which the plan is
        if plan and (plan.reads or plan.writes):
            reader = StreamReader(Task(name), self.cache, plan, addressing, call.target, requests, reservation)
            reader.begin(inner)
            with closing(CachedStream(self.streams, method, reader, context, reservation, call, generations)) as stream:
                yield from stream.replies()
            return
        if plan:
            refuse_only(plan)
        else:
            plan = self.cache.refuse_unexpected(call.target, context)
        headers = plan.headers(CACHE_BYPASS) if is_cacheable and plan else ()
        whole = WholeStream(context, headers)
        buffer = ResendBuffer(method, addressing, chain([first], requests), context, reservation, whole)
        try:
            with closing(self.streams.replies(method, buffer, context)) as replies:
                for reply in replies:
                    self.cache.refuse_changed(plan, buffer.replica)
                    yield reply
        finally:
            call.texts = buffer.answered
            call.instance = buffer.replica.instance if buffer.replica else call.instance
            if is_cacheable and plan:
                self.cache.count(plan, CACHE_BYPASS, buffer.answered)


class StreamReader:
    """Reads the requests of one stream in a thread of its own, as far ahead as READ_AHEAD."""

    def __init__(
        self,
        task: Task,
        cache: EmbeddingCache,
        plan: CachePlan,
        addressing: Addressing,
        target: Target,
        requests: Iterator[bytes],
        reservation: Reservation,
    ) -> None:
        self.reservation = reservation
        self.task = task
        self.cache = cache
        self.plan = plan
        self.addressing = addressing
        self.target = target
        self.requests = requests
        self.slots = SimpleQueue[StreamSlot | None]()
        self.misses = SimpleQueue[bytes | None]()
        self.room = threading.Semaphore(READ_AHEAD)
        self.lock = threading.Lock()
        self.ended = False

    def begin(self, first: bytes) -> None:
        """first: TEI's own request in the message that has been read."""
        threading.Thread(target=self.work, args=(first,), name="stream-reader", daemon=True).start()

    def work(self, first: bytes) -> None:
        problem: Problem | None = Problem(Kind.INTERNAL, "INTERNAL", "Reading the stream failed: see the log")
        try:
            self.take(first)
            for number, raw in enumerate(self.requests, start=1):
                self.wait_for_room()
                self.take(self.addressing.following(raw, self.target, number))
            problem = None
        except Problem as refusal:
            problem = refusal
        except grpc.RpcError:
            problem = Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        finally:
            self.slots.put(StreamSlot(problem=problem) if problem else None)
            self.misses.put(None)

    def wait_for_room(self) -> None:
        while not self.room.acquire(timeout=POLL_SECS):
            if self.ended:
                raise grpc.RpcError("the stream has ended")

    def take(self, inner: bytes) -> None:
        request = cached_replies.request_of(self.task, inner)
        key = self.plan.keys(self.task, request.options)(request.text)
        # Those who compute what is not in the cache may be others by now.
        entry = self.cache.find(self.plan, [key]).get(key) if self.cache.still(self.plan) else None
        self.reservation.grow(len(entry.vector) if entry else len(inner), bounded=False)
        if entry is None:
            refuse_only(self.plan)
        with self.lock:
            self.slots.put(StreamSlot(key, entry))
            if entry is None:
                self.misses.put(inner)

    def end_uncached(self) -> bool:
        """End the stream to the replicas, unless something has come for it by now; whether it ends."""
        with self.lock:
            if is_idle := self.slots.empty():
                self.misses.put(None)
                self.misses = SimpleQueue()  # of the next stream: that one's thread may not take its end any more
            return is_idle

    def uncached(self) -> Iterator[bytes]:
        """The requests that are not in the cache, for the replicas. Whoever takes one books its memory anew."""
        for inner in iter(self.misses.get, None):  # of this moment
            self.reservation.shrink(len(inner))
            yield inner


class CachedStream:
    """The answers of one stream, in the thread of its call."""

    def __init__(
        self,
        streams: Streams,
        method: Method,
        reader: StreamReader,
        context: grpc.ServicerContext,
        reservation: Reservation,
        call: CallRecord,
        generations: Generations,
    ) -> None:
        self.streams = streams
        self.method = method
        self.reader = reader
        self.cache, self.plan = reader.cache, reader.plan
        self.context = context
        self.reservation = reservation
        self.call = call
        self.caller = JoinedCall(context)  # so that the end of the computation is not at once that of the call
        self.computed: Generator[bytes] | None = None
        self.buffer: ResendBuffer | None = None  # of what is computed
        self.whole = WholeStream(context, reader.plan.headers("stream")[1:])
        self.generations = generations  # of the instances that may compute it
        self.computed_at = float("-inf")
        self.hits = self.misses = 0

    def replies(self) -> Iterator[bytes]:
        """Raises: Problem."""
        self.whole.begin(self.reader.target, self.generations)
        while (slot := self.next_slot()) is not None:
            if slot.problem:
                raise slot.problem
            yield self.hit(slot.entry) if slot.entry else self.miss(slot.key)
            self.call.texts += 1
            self.call.instance = self.plan.instance
            self.reader.room.release()
        self.end_computed()
        counts = (CACHE_KEY, f"hits={self.hits}, misses={self.misses}")
        self.context.set_trailing_metadata((*self.caller.trailing, counts))

    def next_slot(self) -> StreamSlot | None:
        """The next one. After a while without any, the replica's stream ends: it may go away unnoticed while nobody
        reads from it, and what is asked then would be lost with it."""
        with suppress(Empty):
            return self.reader.slots.get(timeout=IDLE_SECS)
        if self.computed and self.reader.end_uncached():
            self.end_computed()
            self.computed = None
            self.caller.callbacks.clear()  # they were to end that stream
        return self.reader.slots.get()

    def end_computed(self) -> None:
        """The replicas have answered all that they were asked: that one has gone since then, or hangs, is no failure of
        the call.

        Raises: Problem of answers that cannot be right.
        """
        try:
            for _ in self.computed or ():
                pass
        except CallEnded as ended:
            if ended.code is not grpc.StatusCode.UNAVAILABLE:
                abort(self.context, ended.code, ended.details, ended.trailing)
        except Problem as problem:
            if problem.kind not in {Kind.UNAVAILABLE, Kind.TIMEOUT}:
                raise

    def hit(self, entry: CachedEmbedding) -> bytes:
        self.hits += 1
        self.reservation.shrink(len(entry.vector))
        self.cache.count(self.plan, CACHE_HIT, 1, entry.tokens)
        return cached_replies.reply_of(self.reader.task, entry)

    def miss(self, key: bytes) -> bytes:
        """The next reply of the replicas, which is that of this key."""
        if self.computed is None:
            unwrapped = Unwrapped(self.reader.target)
            uncached, caller = self.reader.uncached(), self.caller
            self.buffer = ResendBuffer(self.method, unwrapped, uncached, caller, self.reservation, self.whole)
            self.buffer.instances = frozenset(name for name, _ in self.generations)
            self.computed = self.streams.replies(self.method, self.buffer, self.caller)
        self.misses += 1
        self.cache.count(self.plan, CACHE_MISS, 1)
        try:
            reply, before = next(self.computed, None), self.computed_at
        except CallEnded as ended:
            abort(self.context, ended.code, ended.details, ended.trailing)
        if reply is None:
            raise Problem(Kind.INTERNAL, "INTERNAL", "The replica ended the stream before its last answer")
        replica = self.buffer.replica if self.buffer else None
        self.cache.refuse_changed(self.plan, replica)
        entry, metadata = cached_replies.entry_of(self.reader.task, key, reply)
        self.computed_at = time.monotonic()
        # Texts of one batch all have its time: what counts is by how much later this one came than the one before.
        secs = min(metadata.inference_time_ns / 1e9, self.computed_at - before)
        self.cache.savings.measured(self.plan.fingerprint, entry.tokens, secs)
        self.cache.keep(self.plan, [entry], replica)
        return reply

    def close(self) -> None:
        """Nothing is computed for it any more."""
        self.reader.ended = True
        self.reader.misses.put(None)
        if self.computed:
            self.computed.close()
