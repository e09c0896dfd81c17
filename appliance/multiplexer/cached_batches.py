"""Whole batches: all their distinct texts are looked up at once, and only those that are not there are computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from appliance.core.cachekey import TASKS, CachedEmbedding, Task
from appliance.core.problems import Problem
from appliance.multiplexer import cached_replies
from appliance.multiplexer.batch import BatchRunner
from appliance.multiplexer.batch_run import BatchJob, TextFailure
from appliance.multiplexer.cached_calls import refuse_only
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.embedding_cache import CachePlan, EmbeddingCache
from appliance.multiplexer.joined_call import may_block
from appliance.multiplexer.metering import CallRecord
from appliance.wire import vectors
from appliance.wire.envelope import CACHE_BYPASS, CACHE_HIT, CACHE_KEY, CACHE_MISS, FINGERPRINT_KEY

KEPT_TOGETHER = 256  # entries that are given to the writer at once
LOOKED_UP_TOGETHER = 2048  # texts: the vectors of all of them would be in memory beside those that were booked


@dataclass
class CacheCounts:
    """Of the distinct texts of one call, for its reply metadata."""

    hits: int = 0
    misses: int = 0
    bypassed: bool = False
    fingerprint: str | None = None
    planned: bool = False

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Nothing for a call without texts to compute."""
        if not self.planned:
            return ()
        outcome = CACHE_BYPASS if self.bypassed else f"hits={self.hits}, misses={self.misses}"
        shown = ((FINGERPRINT_KEY, self.fingerprint),) if self.fingerprint else ()
        return ((CACHE_KEY, outcome), *shown)


@dataclass(frozen=True)
class CachedBatch:
    """A job without its requests, and what these are made of: the bytes of its texts, and the options behind each,
    which are in the keys, too. The collector takes all answers."""

    job: BatchJob
    texts: Sequence[bytes]
    options: bytes
    collector: Any

    def job_for(self, texts: Sequence[int], on_answer: Callable[[int, bytes], None]) -> BatchJob:
        """The job for some of the texts. on_answer: called with the place among them."""
        chosen = [self.texts[text] for text in texts]
        return replace(
            self.job,
            # `inputs` is field 1 of EmbedRequest and of EmbedSparseRequest.
            requests=[vectors.length_delimited(1, text) + self.options for text in chosen],
            lengths=[self.collector.cost or len(text) for text in chosen],
            on_answer=on_answer,
        )


class CachedRunner:
    """`BatchRunner.run` with the cache before it."""

    def __init__(self, runner: BatchRunner, cache: EmbeddingCache) -> None:
        self.runner = runner
        self.cache = cache

    def run(
        self, batch: CachedBatch, context: grpc.ServicerContext, call: CallRecord, counts: CacheCounts
    ) -> dict[int, TextFailure]:
        """The texts that failed. Raises: Problem."""
        if batch.job.method not in TASKS:
            expects = self.cache.refuse_unexpected(batch.job.target, context)
            with call.waiting():
                failures = self.runner.run(batch.job_for(range(len(batch.texts)), batch.job.on_answer))
            self.cache.refuse_changed(expects)
            return failures
        plan = self.cache.plan(batch.job.target, context)
        counts.planned, counts.fingerprint = True, plan.fingerprint
        call.instance = plan.instance
        if not (plan.reads or plan.writes):
            if refused := refused_texts(batch, plan, range(len(batch.texts))):
                return refused
            counts.bypassed = True
            with self.counting(plan, CACHE_BYPASS, len(batch.texts)), call.waiting():
                failures = self.runner.run(batch.job_for(range(len(batch.texts)), batch.job.on_answer))
            self.cache.refuse_changed(plan)
            return failures
        if self.cache.store_waits:
            may_block(context)
        task = Task(batch.job.method)
        key_of = plan.keys(task, batch.options)
        keys = [key_of(text) for text in batch.texts]
        missing, tokens = self.accept_found(batch, plan, keys)
        hits = len(keys) - len(missing)
        counts.hits += hits
        counts.misses += len(missing)
        with self.counting(plan, CACHE_HIT, hits, tokens):
            if not missing:
                return {}
            if refused := refused_texts(batch, plan, missing):
                return refused
            with self.counting(plan, CACHE_MISS, len(missing)), call.waiting():
                failures = self.compute(batch, task, plan, keys, missing)
            self.cache.refuse_changed(plan)
        return failures

    @contextmanager
    def counting(self, plan: CachePlan, outcome: str, texts: int, tokens: int = 0) -> Iterator[None]:
        """Count texts when the block has ended, however it did, unless their call begins anew."""
        begins_anew = False
        try:
            yield
        except WouldBlock:
            begins_anew = True
            raise
        finally:
            if not begins_anew:
                self.cache.count(plan, outcome, texts, tokens)

    def accept_found(self, batch: CachedBatch, plan: CachePlan, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Give the collector what is in the cache; returns the numbers of the texts that are not, and the tokens of the
        others. Raises: Problem when the reply would be too large."""
        missing, tokens = [], 0
        for begin in range(0, len(keys), LOOKED_UP_TOGETHER):
            some = keys[begin : begin + LOOKED_UP_TOGETHER]
            found = self.cache.find(plan, some)
            entries = {text: found[key] for text, key in enumerate(some, start=begin) if key in found}
            batch.collector.accept_entries(entries)
            tokens += sum(entry.tokens for entry in entries.values())
            if len(entries) < len(some):
                missing += [text for text in range(begin, begin + len(some)) if text not in entries]
        return missing, tokens

    def compute(
        self, batch: CachedBatch, task: Task, plan: CachePlan, keys: Sequence[bytes], missing: Sequence[int]
    ) -> dict[int, TextFailure]:
        computed: deque[CachedEmbedding] = deque()  # by several threads, in any order
        tokens = 0

        def accept(number: int, reply: bytes) -> None:
            nonlocal tokens
            text = missing[number]
            batch.job.on_answer(text, reply)
            entry = cached_replies.entry_of(task, keys[text], reply)[0]
            tokens += entry.tokens
            computed.append(entry)
            if len(computed) >= KEPT_TOGETHER:
                keep()

        def keep() -> None:
            entries = []
            with suppress(IndexError):
                while True:
                    entries.append(computed.popleft())
            self.cache.keep(plan, entries)

        began = time.monotonic()
        try:
            failures = self.runner.run(batch.job_for(missing, accept))
        except WouldBlock:
            computed.clear()  # it would find them when it begins anew, and count them as hits
            raise
        finally:  # what was computed before a failure is right, too
            keep()
            self.cache.savings.measured(plan.fingerprint, tokens, time.monotonic() - began)
        return {missing[number]: failure for number, failure in failures.items()}


def refused_texts(batch: CachedBatch, plan: CachePlan, missing: Sequence[int]) -> dict[int, TextFailure]:
    """Those that are not in the cache, where nothing is to be computed and rows that fail are null; else none of them.

    Raises: Problem NOT_CACHED where the first row that fails ends the call.
    """
    if not batch.job.keep_failures:
        refuse_only(plan, len(missing))
        return {}
    try:
        refuse_only(plan)
    except Problem as problem:
        return dict.fromkeys(missing, TextFailure(grpc.StatusCode.NOT_FOUND, problem.message))
    return {}
