"""Which entries a call may use and keep, by a cache whose store and fingerprints are held in memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.cachekey import CachedEmbedding, Fingerprint
from appliance.core.problems import Problem
from appliance.core.routing import Replica, Route, Table, Target
from appliance.drivers.purgefile import PurgeFile
from appliance.multiplexer.attempts import UnaryReply
from appliance.multiplexer.cached_calls import CachedCalls
from appliance.multiplexer.embedding_cache import (
    LONGEST_REMEMBERED,
    CachePlan,
    EmbeddingCache,
    Mode,
    remembered_keys_for,
)
from appliance.multiplexer.metering import CallRecord
from appliance.node.context import now_ms
from appliance.node.fingerprints import Known
from appliance.wire.envelope import CACHE_KEY, FINGERPRINT_KEY
from appliance.wire.methods import METHODS

TARGET = Target(model_id="a-model")
TTL_SECS = 60
FINGERPRINTS = {name: Fingerprint((("pooling", name),)) for name in ("one", "other")}


class MemoryStore:
    """Keeps what it is given."""

    evicted = 0

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get_many(self, fingerprint: str, keys: Any) -> dict[bytes, bytes]:
        return {key: self.values[key] for key in keys if key in self.values}

    def put_many(self, fingerprint: str, values: Any) -> None:
        self.values |= values

    def close(self) -> None:
        pass


class Watch:
    """`FingerprintWatch` of two instances of one model."""

    def __init__(self) -> None:
        routes = (Route("one", "a-model", "running", ()), Route("other", "a-model", "stopped", ()))
        self.pool = SimpleNamespace(directory=SimpleNamespace(table=Table(routes)))

    def current(self, route: Route) -> Known:
        return Known(FINGERPRINTS[route.name])

    def of_replica(self, replica: Replica) -> str | None:
        return FINGERPRINTS[replica.instance].digest

    def switch(self) -> None:
        """From one to the other."""
        table = self.pool.directory.table
        turned = {"running": "stopped", "stopped": "running"}
        self.pool.directory.table = Table(tuple(replace(each, wanted=turned[each.wanted]) for each in table.routes))


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    meters: Any = SimpleNamespace(
        lookups=SimpleNamespace(labels=lambda *_: None), reads=SimpleNamespace(observe=lambda _: None)
    )
    watch: Any = Watch()
    store: Any = MemoryStore()
    made = EmbeddingCache(watch, store, PurgeFile(tmp_path / "purges"), meters, lambda *_: None, TTL_SECS, lambda _: "")
    yield made
    made.stop()


def plan_of(cache: EmbeddingCache) -> CachePlan:
    routes = cache.watch.pool.directory.table.routes
    return cache.plan_for(routes, Mode.USE, "")._replace(target=TARGET)


def entry(key: bytes, age_secs: float = 0.0) -> CachedEmbedding:
    return CachedEmbedding(key, now_ms() - int(age_secs * 1000), 1, 1, b"\0" * 8)


def test_of_whom_nobody_knows_whose_entries_he_may_use_has_none(cache: EmbeddingCache) -> None:
    plan = cache.plan_for(cache.watch.pool.directory.table.routes, Mode.USE, None)
    assert (plan.reads, plan.writes) == (False, False)
    assert plan.fingerprint == plan_of(cache).fingerprint


def test_what_is_too_old_is_not_found_on_its_way_to_the_store_either(cache: EmbeddingCache) -> None:
    plan, young, old = plan_of(cache), b"y" * 20, b"o" * 20
    cache.keep(plan, [entry(young, age_secs=TTL_SECS / 2), entry(old, age_secs=TTL_SECS + 1)])
    assert cache.recent(plan, young)
    assert cache.recent(plan, old) is None
    assert list(cache.find(plan, [young, old])) == [young]


def test_what_another_instance_of_the_model_has_computed_meanwhile_is_not_kept(cache: EmbeddingCache) -> None:
    """The one that was asked is stopped, and has its fingerprint still; another one has answered."""
    plan, key = plan_of(cache), b"k" * 20
    watch: Any = cache.watch
    watch.switch()
    cache.keep(plan, [entry(key)])
    assert cache.find(plan, [key]) == {}
    watch.switch()
    cache.keep(plan, [entry(key)])
    assert list(cache.find(plan, [key])) == [key]


def test_what_a_replica_of_another_fingerprint_has_computed_is_not_kept(cache: EmbeddingCache) -> None:
    """A replacement was undone, and a stream has not left its replica yet: the instance is what it was again."""
    plan, key = plan_of(cache), b"k" * 20
    ours, other = (Replica(name, 0, "127.0.0.1:1", "a-model", 1, 64) for name in ("one", "other"))
    cache.keep(plan, [entry(key)], other)
    assert cache.find(plan, [key]) == {}
    with pytest.raises(Problem, match="has another fingerprint"):
        cache.refuse_changed(plan._replace(expected=plan.fingerprint), other)
    cache.refuse_changed(plan._replace(expected=plan.fingerprint), ours)
    cache.keep(plan, [entry(key)], ours)
    assert list(cache.find(plan, [key])) == [key]


def test_long_options_are_not_remembered(cache: EmbeddingCache) -> None:
    plan = plan_of(cache)
    before = remembered_keys_for.cache_info().currsize
    keys = {plan.keys("Embed", letter * (LONGEST_REMEMBERED + 1))(b"a text") for letter in (b"x", b"y")}
    assert len(keys) == 2
    assert remembered_keys_for.cache_info().currsize == before


class LookingWatch(Watch):
    """Knows of a launch only after a look at its instance, as `FingerprintWatch` does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def current(self, route: Route) -> Known:
        self.seen.add(route.name)
        return super().current(route)

    def of_replica(self, replica: Replica) -> str | None:
        return super().of_replica(replica) if replica.instance in self.seen else None


def test_what_a_replica_has_computed_that_nobody_has_looked_at_yet_is_kept(cache: EmbeddingCache) -> None:
    """The first call after a wake or a restart: the new launch was not known, so the right fingerprint was refused."""
    plan, key = plan_of(cache), b"k" * 20
    watch: Any = LookingWatch()
    cache.watch = watch
    woken = Replica("one", 0, "127.0.0.1:1", "a-model", 2, 64)
    cache.refuse_changed(plan._replace(expected=plan.fingerprint), woken)
    watch.seen.clear()
    cache.keep(plan, [entry(key)], woken)
    assert list(cache.find(plan, [key])) == [key]


@pytest.mark.parametrize(("computed_by", "fingerprint"), [("one", [FINGERPRINTS["one"].digest]), ("other", [])])
def test_a_reply_is_labelled_with_the_fingerprint_of_the_replica_that_computed_it_or_none(
    cache: EmbeddingCache, computed_by: str, fingerprint: list[str]
) -> None:
    """A replica that had been replaced answered, and its vector had the name of the other fingerprint."""
    embed = next(method for method in METHODS if method.name == "Embed")
    reply = UnaryReply(b"", [], (), Replica(computed_by, 0, "127.0.0.1:1", "a-model", 1, 64))
    attempts: Any = SimpleNamespace(unary=lambda *_: reply)
    context: Any = SimpleNamespace(invocation_metadata=lambda: ((CACHE_KEY, "bypass"),))
    counted: Any = SimpleNamespace(inc=lambda _: None)
    cache.outcomes = lambda *_: counted  # type: ignore[assignment]
    answer = CachedCalls(attempts, cache).unary(embed, TARGET, b"", context, CallRecord())
    assert [value for key, value in answer.headers if key == FINGERPRINT_KEY] == fingerprint
    assert (CACHE_KEY, "bypass") in answer.headers
