"""Unary calls for embeddings: answered from the cache, or computed once for all who ask for the same at this moment."""

from __future__ import annotations

import time
from typing import Any

import grpc

from appliance.core.cachekey import TASKS, CachedEmbedding, Task
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.routing import Target
from appliance.drivers.grpccalls import abort
from appliance.multiplexer import cached_replies
from appliance.multiplexer.attempts import Attempts, UnaryReply
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.embedding_cache import CachePlan, EmbeddingCache, Mode
from appliance.multiplexer.joined_call import CallEnded, may_block
from appliance.multiplexer.metering import CallRecord
from appliance.multiplexer.single_flight import SingleFlight
from appliance.wire.envelope import CACHE_BYPASS, CACHE_HIT, CACHE_MISS, DO_NOT_WAIT, INSTANCE_KEY, WAIT_KEY
from appliance.wire.methods import Method


class CachedCalls:
    """`Attempts.unary` with the cache before it."""

    def __init__(self, attempts: Attempts, cache: EmbeddingCache) -> None:
        self.attempts = attempts
        self.cache = cache
        self.flights = SingleFlight[UnaryReply]()

    def unary(
        self, method: Method, target: Target, inner: bytes, context: grpc.ServicerContext, call: CallRecord
    ) -> UnaryReply:
        """The reply of the cache or of a replica. A failure ends the caller's call. Raises: Problem."""
        if method.name not in TASKS:
            expects = self.cache.refuse_unexpected(target, context)
            reply = self.attempts.unary(method, target, inner, context, call)
            self.cache.refuse_changed(expects, reply.replica)
            return reply
        task = Task(method.name)
        plan = self.cache.plan(target, context)
        if not (plan.reads or plan.writes):
            refuse_only(plan)
            reply = self.ask(plan, CACHE_BYPASS, method, target, inner, context, call)
            self.cache.refuse_changed(plan, reply.replica)
            reply.headers.extend(self.cache.headers(plan, CACHE_BYPASS, reply.replica))
            return reply
        if self.cache.store_waits:
            may_block(context)
        request = cached_replies.request_of(task, inner)
        key = plan.keys(task, request.options)(request.text)
        if stored := self.stored(task, plan, key, call):
            return stored
        refuse_only(plan)
        return self.computed(method, task, plan, key, target, inner, context, call)

    def ask(
        self,
        plan: CachePlan,
        outcome: str,
        method: Method,
        target: Target,
        inner: bytes,
        context: grpc.ServicerContext,
        call: CallRecord,
    ) -> UnaryReply:
        """The reply of a replica, counted as ``outcome`` however it ends, unless the call begins anew."""
        begins_anew = False
        try:
            return self.attempts.unary(method, target, inner, context, call)
        except WouldBlock:
            begins_anew = True
            raise
        finally:
            if not begins_anew:
                self.cache.count(plan, outcome, 1)

    def stored(self, task: Task, plan: CachePlan, key: bytes, call: CallRecord) -> UnaryReply | None:
        entry = self.cache.find(plan, [key]).get(key)
        if entry is None:
            return None
        call.instance = plan.instance
        return self.hit(task, plan, entry)

    def hit(self, task: Task, plan: CachePlan, entry: CachedEmbedding) -> UnaryReply:
        self.cache.count(plan, CACHE_HIT, 1, entry.tokens)
        message = cached_replies.reply_of(task, entry)
        return UnaryReply(message, [(INSTANCE_KEY, plan.instance), *plan.headers(CACHE_HIT)], ())

    def computed(
        self,
        method: Method,
        task: Task,
        plan: CachePlan,
        key: bytes,
        target: Target,
        inner: bytes,
        context: grpc.ServicerContext,
        call: CallRecord,
    ) -> UnaryReply:
        def work(caller: Any) -> UnaryReply:
            began = time.monotonic()
            reply = self.ask(plan, CACHE_MISS, method, target, inner, caller, call)
            entry, metadata = cached_replies.entry_of(task, key, reply.message)
            took_ns = metadata.inference_time_ns + metadata.tokenization_time_ns
            self.cache.savings.measured(plan.fingerprint, entry.tokens, took_ns / 1e9 or time.monotonic() - began)
            self.cache.keep(plan, [entry], reply.replica)
            reply.headers.extend(self.cache.headers(plan, CACHE_MISS, reply.replica))
            return reply

        def found() -> UnaryReply | None:
            entry = self.cache.recent(plan, key)
            return None if entry is None else self.hit(task, plan, entry)

        def joined() -> None:
            call.instance = plan.instance
            self.cache.meters.joins.labels(plan.instance).inc()

        # Of instances that share their entries, one that is stuck does not hold up the callers of another.
        flight = key + str(target).encode()
        if plan.mode is Mode.REFRESH:  # computed for this caller: the work of another may be of before
            flight += id(context).to_bytes(8, "little")
        if (WAIT_KEY, DO_NOT_WAIT) in context.invocation_metadata():  # who wants no wait does not join one
            flight += DO_NOT_WAIT.encode()
        with call.waiting():
            try:
                reply = self.flights.compute(flight, context, work, found, joined)
            except CallEnded as ended:
                abort(context, ended.code, ended.details, ended.trailing)
        self.cache.refuse_changed(plan, reply.replica)
        return reply._replace(headers=list(reply.headers))  # of others, too; each adds its own


def refuse_only(plan: CachePlan, missing: int = 1) -> None:
    """Raises: Problem NOT_CACHED where the caller wants nothing to be computed."""
    if plan.mode is Mode.ONLY:
        why = f": {plan.why}" if plan.why else ""
        texts = "The text is" if missing == 1 else f"{missing} of the texts are"
        raise Problem(
            Kind.NOT_FOUND,
            "NOT_CACHED",
            f"{texts} not in the cache of {quoted(plan.instance)}{why}; without x-tei-cache: only it is computed",
        )
