"""The cache of embeddings as the calls of this process use it.

Before anything else happens to a call for embeddings, a `CachePlan` is made of it: whose vectors it wants, and what its
caller said about the cache. An entry is used if its key and checksum are right, nobody has purged it, and it is not too
old. One is kept only if the fingerprint was the same before and after it was computed. What the store cannot do is a
miss: no call fails or waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import grpc

from appliance.core import routing
from appliance.core.cachekey import CachedEmbedding, Damaged, is_purged, keys_for, unpacked
from appliance.core.cachestore import Failure, Store, StoreFailed
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.core.routing import Replica, Route, Target
from appliance.drivers.metrics import CacheMeters
from appliance.drivers.purgefile import PurgeFile
from appliance.multiplexer.cache_writer import CacheWriter
from appliance.multiplexer.cooperation import WouldBlock
from appliance.multiplexer.fingerprint_watch import FingerprintWatch
from appliance.multiplexer.joined_call import scheduler_of
from appliance.multiplexer.savings import Savings
from appliance.wire.envelope import CACHE_BYPASS, CACHE_KEY, EXPECT_KEY, FINGERPRINT_KEY

remembered_keys_for = lru_cache(1024)(keys_for)
LONGEST_REMEMBERED = 256  # bytes of options: callers could fill the memory with longer ones
SLOW_READ_SECS = 0.1  # a read of this length says that the next may be as slow
QUIET_SECS = 60.0  # at least, between two events of one failure


class Mode(StrEnum):
    """What a caller says about the cache, in the metadata CACHE_KEY."""

    USE = "use"
    BYPASS = CACHE_BYPASS
    REFRESH = "refresh"  # computed again, and written
    ONLY = "only"  # what is not there is not computed


class CachePlan(NamedTuple):
    """For one call. fingerprint: None where nothing may be read or kept, and ``why`` not.

    routes: the instances that may answer; all of one fingerprint. target: what was asked for. expected: the fingerprint
    without which the caller wants no vector.
    """

    mode: Mode
    routes: tuple[Route, ...]
    fingerprint: str | None
    why: str = ""
    scope: str = ""
    off: bool = False
    target: Target | None = None
    expected: str | None = None

    @property
    def reads(self) -> bool:
        return self.fingerprint is not None and not self.off and self.mode in (Mode.USE, Mode.ONLY)

    @property
    def writes(self) -> bool:
        return self.fingerprint is not None and not self.off and self.mode in (Mode.USE, Mode.REFRESH)

    @property
    def instance(self) -> str:
        return self.routes[0].name if self.routes else ""

    def keys(self, task: str, options: bytes) -> Callable[[bytes], bytes]:
        assert self.fingerprint
        maker = remembered_keys_for if len(options) <= LONGEST_REMEMBERED else keys_for
        return maker(self.fingerprint, self.scope, task, options)

    def headers(self, outcome: str) -> list[tuple[str, str]]:
        """Reply metadata. outcome: hit, miss or bypass, or the counts of a batch."""
        shown = [(FINGERPRINT_KEY, self.fingerprint)] if self.fingerprint else []
        return [(CACHE_KEY, outcome), *shown]


class EmbeddingCache:
    """Thread-safe. store: None where the configuration has the cache off; fingerprints are known all the same.

    scope_of: whose entries a call may use; empty where they are everybody's, None for none. store_is_remote: of another
    program.
    """

    def __init__(
        self,
        watch: FingerprintWatch,
        store: Store | None,
        purges: PurgeFile,
        meters: CacheMeters,
        record: Callable[[Event, str], None],
        ttl_secs: int,
        scope_of: Callable[[grpc.ServicerContext], str | None],
        store_is_remote: bool = False,
    ) -> None:
        self.watch = watch
        self.store = store
        self.purges = purges
        self.meters = meters
        self.record = record
        self.ttl_ms = ttl_secs * 1000
        self.scope_of = scope_of
        self.store_is_remote = store_is_remote
        self.slow_until = 0.0  # of time.monotonic
        self.savings = Savings()
        self.evicted_before = 0
        self.outcomes = lru_cache(4096)(meters.lookups.labels)  # looked up once: prometheus_client takes 3 us
        self.failing: dict[Failure, float] = {}  # until when nothing more is said of it
        self.lock = threading.Lock()
        self.writer = CacheWriter(store, self.note_failure, self.note_success) if store else None

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self, target: Target, context: grpc.ServicerContext) -> CachePlan:
        """Raises: Problem for metadata that means nothing, and FINGERPRINT_DIFFERS where another one is expected."""
        metadata = dict(context.invocation_metadata())
        mode = mode_of(metadata.get(CACHE_KEY))
        expected = metadata.get(EXPECT_KEY)
        directory = self.watch.pool.directory
        try:
            routes = routing.routes_of(directory.table, target)
        except Problem:  # the call itself will say so, after another look at the state file
            routes = ()
        if not routes and (mode is Mode.ONLY or expected is not None):  # which it will not come to
            directory.refresh()
            routes = routing.routes_of(directory.table, target)
        if scheduler_of(context) and not all(self.watch.is_quick(route) for route in routes if route.is_offered):
            raise WouldBlock
        plan = self.plan_for(routes, mode, self.scope_of(context))
        plan = plan._replace(target=target, expected=None if expected is None else str(expected))
        if plan.expected is not None:
            self.refuse_other(plan, plan.expected)
        return plan

    def plan_for(self, routes: tuple[Route, ...], mode: Mode, scope: str | None) -> CachePlan:
        running = tuple(route for route in routes if route.is_offered)
        if not running:
            return CachePlan(mode, routes, None, "it is not there, or stopped")
        known = [self.watch.current(route) for route in running]
        first = known[0]
        if any(each.digest != first.digest for each in known):
            return CachePlan(mode, running, None, "its instances have several fingerprints")
        if self.store is None or not all(route.cache for route in running):
            # Known all the same: callers may ask for it.
            return CachePlan(mode, running, first.digest, "the cache is off", off=True)
        if scope is None:
            return CachePlan(mode, running, first.digest, "it is not known whose call it is", off=True)
        return CachePlan(mode, running, first.digest, first.why, scope)

    def refuse_unexpected(self, target: Target, context: grpc.ServicerContext) -> CachePlan | None:
        """For calls that are not cached: what the caller expects, if anything. Raises: Problem as `plan`."""
        metadata = dict(context.invocation_metadata())
        if not (CACHE_KEY in metadata or EXPECT_KEY in metadata):
            return None
        plan = self.plan(target, context)
        if plan.mode is Mode.ONLY:
            raise Problem(Kind.NOT_FOUND, "NOT_CACHED", "Only dense and sparse embeddings are cached")
        return plan

    def refuse_other(self, plan: CachePlan, expected: str) -> None:
        """Raises: Problem FINGERPRINT_DIFFERS unless the plan has the fingerprint that the caller expects."""
        if plan.fingerprint == expected:
            return
        has = f"has the fingerprint {plan.fingerprint}" if plan.fingerprint else f"has none now: {plan.why}"
        raise Problem(
            Kind.PRECONDITION,
            "FINGERPRINT_DIFFERS",
            f"The caller expects vectors of the fingerprint {quoted(expected)}, and {quoted(plan.instance)} {has}; "
            "GET /compatibility says what differs",
        )

    def refuse_changed(self, plan: CachePlan | None, replica: Replica | None = None) -> None:
        """Behind the computation. replica: that has computed it, where it is one.

        Raises: Problem FINGERPRINT_DIFFERS where it may be of another fingerprint.
        """
        if plan and plan.expected is not None and not self.still(plan, replica):
            words = f"{quoted(plan.instance)} has another fingerprint than {quoted(plan.expected)} since it was asked"
            raise Problem(Kind.PRECONDITION, "FINGERPRINT_DIFFERS", words)

    def headers(self, plan: CachePlan, outcome: str, replica: Replica | None) -> list[tuple[str, str]]:
        """Reply metadata of what a replica has computed: without the fingerprint where it may be of another one."""
        if replica is None or self.watch.of_replica(replica) == plan.fingerprint or self.still(plan, replica):
            return plan.headers(outcome)
        return plan._replace(fingerprint=None).headers(outcome)

    def still(self, plan: CachePlan, replica: Replica | None = None) -> bool:
        """Whether the target still has the plan's fingerprint: what was computed since then is of it. Other instances
        may have become those of its model or alias meanwhile.

        replica: that has computed something. It may be of another fingerprint all the same: of a replacement that was
        undone, and which a stream has not left yet.
        """
        if plan.target is None:
            return False
        try:
            routes = routing.routes_of(self.watch.pool.directory.table, plan.target)
        except Problem:
            return False
        running = [route for route in routes if route.is_offered]
        if not running or any(self.watch.current(route).digest != plan.fingerprint for route in running):
            return False
        return replica is None or self.watch.of_replica(replica) == plan.fingerprint  # known since the look above

    # -- entries ------------------------------------------------------------------------------------------------------

    def find(self, plan: CachePlan, keys: Sequence[bytes]) -> dict[bytes, CachedEmbedding]:
        """The entries that may be used; each key at most once."""
        if not plan.reads or self.store is None or self.writer is None or plan.fingerprint is None:
            return {}
        fresh = self.writer.found(plan.fingerprint, keys)
        missing = [key for key in keys if key not in fresh] if fresh else keys
        raws = {**(self.read(plan.fingerprint, missing) if missing else {}), **fresh}
        return self.usable(plan.fingerprint, raws)

    @property
    def store_waits(self) -> bool:
        """Whether a read may take longer than a moment: of another program, or of a disk that was slow just now."""
        return self.store_is_remote or time.monotonic() < self.slow_until

    def read(self, fingerprint: str, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        assert self.store
        began = time.monotonic()
        try:
            return self.store.get_many(fingerprint, keys)
        except StoreFailed as failure:
            self.note_failure(failure)
            return {}
        finally:
            took = time.monotonic() - began
            self.meters.reads.observe(took)
            if took > SLOW_READ_SECS:
                self.slow_until = time.monotonic() + QUIET_SECS

    def usable(self, fingerprint: str, raws: Mapping[bytes, bytes]) -> dict[bytes, CachedEmbedding]:
        """Those that are whole, neither purged nor too old."""
        purges = self.purges.current()
        now_ms = time.time_ns() // 1_000_000
        oldest_ms = now_ms - self.ttl_ms if self.ttl_ms else 0
        found: dict[bytes, CachedEmbedding] = {}
        for key, raw in raws.items():
            try:
                entry = unpacked(key, raw)
            except Damaged as damage:
                self.note_damage(f"An entry of the cache was damaged, and is computed again: {damage}")
                continue
            if entry.at_ms >= oldest_ms and not (purges and is_purged(fingerprint, entry.at_ms, purges, now_ms)):
                found[key] = entry
        return found

    def keep(self, plan: CachePlan, entries: Sequence[CachedEmbedding], replica: Replica | None = None) -> None:
        """Entries that were computed for this plan, if its fingerprint is still the one of its instances. replica: that
        has computed them, where it is one."""
        if self.writer and plan.writes and entries and plan.fingerprint and self.still(plan, replica):
            self.writer.offer(plan.fingerprint, {entry.key: entry.packed() for entry in entries})

    def recent(self, plan: CachePlan, key: bytes) -> CachedEmbedding | None:
        """An entry that was computed a moment ago, by this process."""
        if not self.writer or not plan.reads or plan.fingerprint is None:
            return None
        return self.usable(plan.fingerprint, self.writer.found(plan.fingerprint, [key])).get(key)

    def count(self, plan: CachePlan, outcome: str, texts: int, tokens: int = 0) -> None:
        """tokens: of hits, which were not computed again."""
        if not plan.instance:
            return  # callers must not make labels
        self.outcomes(plan.instance, outcome).inc(texts)
        if tokens and plan.fingerprint:
            self.meters.saved.labels(plan.instance).inc(self.savings.of(plan.fingerprint, tokens))

    # -- faults -------------------------------------------------------------------------------------------------------

    def note_failure(self, failure: StoreFailed) -> None:
        self.meters.failures.labels(failure.failure).inc()
        if self.is_news(failure.failure) and failure.failure is not Failure.DAMAGED:  # of which the store tells itself
            self.record(Event.CACHE_FAILED, f"The cache is not used ({failure.failure}): {failure}")

    def is_news(self, failure: Failure) -> bool:
        """Whether nothing was said of it for a while; then it is said now."""
        now = time.monotonic()
        with self.lock:
            if self.failing.get(failure, 0.0) > now:
                return False
            self.failing[failure] = now + QUIET_SECS
            return True

    def note_success(self) -> None:
        if self.store and (more := self.store.evicted - self.evicted_before):
            self.evicted_before += more
            self.meters.evicted.inc(more)
        if self.failing:
            with self.lock:
                had, self.failing = self.failing, {}
            if had.keys() - {Failure.DAMAGED}:
                self.record(Event.CACHE_RECOVERED, "The cache is used again")

    def note_damage(self, words: str) -> None:
        self.meters.failures.labels(Failure.DAMAGED).inc()
        if self.is_news(Failure.DAMAGED):
            self.record(Event.CACHE_DAMAGED, words)

    def stop(self) -> None:
        if self.writer:
            self.writer.stop(within_secs=2.0)
        if self.store:
            self.store.close()


def mode_of(said: str | bytes | None) -> Mode:
    """Raises: Problem invalid."""
    if said is None:
        return Mode.USE
    try:
        return Mode(str(said))
    except ValueError:
        raise invalid(f"{CACHE_KEY} must be bypass, refresh or only, not {quoted(str(said))}") from None
