"""What a batch counts of the cache: once, also where its call begins anew in another thread."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.cachekey import CachedEmbedding
from appliance.core.problems import Kind, Problem
from appliance.core.routing import Target
from appliance.multiplexer.batch_run import BatchJob
from appliance.multiplexer.cached_batches import CacheCounts, CachedBatch, CachedRunner
from appliance.multiplexer.cooperation import Scheduler, WouldBlock
from appliance.multiplexer.joined_call import PartOfCall
from appliance.multiplexer.metering import CallRecord
from appliance.wire.envelope import CACHE_BYPASS, CACHE_HIT, CACHE_MISS
from appliance.wire.tei.v1 import tei_pb2 as tei

REPLY = tei.EmbedResponse(embeddings=[1.0, 0.0], metadata=tei.Metadata(compute_tokens=3)).SerializeToString()
TEXTS = [b"known", b"new", b"newer"]


class Cache:
    """Has the text `known`. is_on: whether it is asked at all."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.store_waits = False
        self.savings = SimpleNamespace(measured=lambda *_: None)
        self.counted: dict[str, int] = {}
        self.kept: list[CachedEmbedding] = []

    def plan(self, target: Target, context: Any) -> Any:
        keys = lambda task, options: bytes  # noqa: E731
        return SimpleNamespace(
            reads=self.is_on, writes=self.is_on, fingerprint="f", instance="one", keys=keys, mode=None, why=None
        )

    def find(self, plan: Any, keys: list[bytes]) -> dict[bytes, Any]:
        return {key: SimpleNamespace(tokens=2) for key in keys if key == b"known"}

    def count(self, plan: Any, outcome: str, texts: int, tokens: int = 0) -> None:
        self.counted[outcome] = self.counted.get(outcome, 0) + texts

    def keep(self, plan: Any, entries: list[CachedEmbedding]) -> None:
        self.kept += entries

    def refuse_changed(self, plan: Any) -> None:
        pass


def run(cache: Cache, compute: Callable[[BatchJob], Any], context: Any = None) -> Any:
    collector = SimpleNamespace(accept_entries=lambda entries: None, cost=None)
    job = BatchJob(Target("one"), "Embed", "/", (), (), lambda text, reply: None, None, lambda: False, False)
    runner: Any = SimpleNamespace(run=compute)
    return CachedRunner(runner, cache).run(  # type: ignore[arg-type]
        CachedBatch(job, TEXTS, b"", collector), context, CallRecord(), CacheCounts()
    )


def one_answer_then(end: Exception | None) -> Callable[[BatchJob], Any]:
    def compute(job: BatchJob) -> Any:
        job.on_answer(0, REPLY)
        if end:
            raise end
        job.on_answer(1, REPLY)
        return {}

    return compute


@pytest.mark.parametrize("end", [None, Problem(Kind.TIMEOUT, "TIMEOUT", "The deadline passed")])
def test_hits_and_misses_are_counted_however_it_ends_and_what_was_computed_is_kept(end: Exception | None) -> None:
    cache = Cache()
    if end:
        with pytest.raises(Problem):
            run(cache, one_answer_then(end))
    else:
        assert run(cache, one_answer_then(None)) == {}
    assert cache.counted == {CACHE_HIT: 1, CACHE_MISS: 2}
    assert [each.key for each in cache.kept] == ([b"new"] if end else [b"new", b"newer"])


def test_a_call_that_begins_anew_has_counted_nothing_and_finds_nothing_of_its_own() -> None:
    cache = Cache()
    with pytest.raises(WouldBlock):
        run(cache, one_answer_then(WouldBlock()))
    assert (cache.counted, cache.kept) == ({}, [])
    assert run(cache, one_answer_then(None)) == {}
    assert cache.counted == {CACHE_HIT: 1, CACHE_MISS: 2}


def test_likewise_beside_the_cache() -> None:
    cache = Cache(is_on=False)
    with pytest.raises(WouldBlock):
        run(cache, one_answer_then(WouldBlock()))
    assert cache.counted == {}
    assert run(cache, lambda job: {}) == {}
    assert cache.counted == {CACHE_BYPASS: 3}


def test_where_the_store_waits_a_call_in_a_common_thread_is_not_looked_up_there() -> None:
    cache = Cache()
    cache.store_waits = True
    common: Any = PartOfCall(SimpleNamespace(), Scheduler())
    with pytest.raises(WouldBlock):
        run(cache, one_answer_then(None), common)
    assert cache.counted == {}
    assert run(cache, one_answer_then(None)) == {}  # in a thread of its own
