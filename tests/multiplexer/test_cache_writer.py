"""Entries on their way to the store are found all the while."""

import time
from collections.abc import Mapping, Sequence

from appliance.core.cachestore import StoreFailed, StoreStats
from appliance.multiplexer.cache_writer import CacheWriter
from testing.cachestores import FINGERPRINT, Rows, rows


class SlowStore:
    """It has what it was given only after a while."""

    evicted = 0

    def __init__(self) -> None:
        self.kept: Rows = {}

    def get_many(self, fingerprint: str, keys: Sequence[bytes]) -> Rows:
        return {key: self.kept[key] for key in keys if key in self.kept}

    def put_many(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        time.sleep(0.02)
        self.kept.update(values)

    def purge(self, fingerprint: str, since_ms: int, until_ms: int) -> int:
        raise NotImplementedError

    def stats(self) -> StoreStats:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_an_entry_is_found_from_the_moment_it_was_offered() -> None:
    failures: list[StoreFailed] = []
    store = SlowStore()
    writer = CacheWriter(store, failures.append, lambda: None)
    offered: Rows = {}
    deadline = time.monotonic() + 1.5
    number = 0
    while time.monotonic() < deadline or len(offered) <= 20:
        some = rows(number, 2, width=2)
        writer.offer(FINGERPRINT, some)
        offered |= some
        number += 1
        for _ in range(20):
            waiting = writer.found(FINGERPRINT, list(offered))  # first: what has left it is in the store
            assert {**store.get_many(FINGERPRINT, list(offered)), **waiting} == offered
    writer.stop(within_secs=30)
    assert store.kept == offered
    assert not failures
    assert len(offered) > 20
