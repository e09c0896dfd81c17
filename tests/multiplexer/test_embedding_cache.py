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
from appliance.multiplexer.cached_replies import now_ms
from appliance.multiplexer.embedding_cache import (
    LONGEST_REMEMBERED,
    CachePlan,
    EmbeddingCache,
    Mode,
    remembered_keys_for,
)
from appliance.node.fingerprints import Known

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
