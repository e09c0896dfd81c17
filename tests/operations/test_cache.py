"""What is forgotten is forgotten, whatever the clock said when it was computed."""

import time
from pathlib import Path

import pytest

from appliance.core.cachekey import CachedEmbedding
from appliance.core.settings import Settings
from appliance.drivers.sqlitestore import SqliteStore
from appliance.node import cachestores
from appliance.node.context import Node
from appliance.operations import cache

KEY = b"k" * 20


@pytest.mark.parametrize("ahead_secs", [-3600, 3600], ids=["before", "before the clock was set back"])
def test_what_was_computed_before_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_secs: int) -> None:
    node = Node.at(Settings(data_dir=str(tmp_path), state_file=f"{tmp_path}/state.toml"))
    store = SqliteStore(tmp_path / "cache", 2**24, print)
    monkeypatch.setattr(cachestores, "opened", lambda _: store)
    computed_ms = time.time_ns() // 1_000_000 + ahead_secs * 1000
    store.put_many("ab" * 32, {KEY: CachedEmbedding(KEY, computed_ms, 1, 1, bytes(16)).packed()})
    assert cache.purge(node, "ab" * 32, 0, "of a test") == 1
    assert not SqliteStore(tmp_path / "cache", 2**24, print).get_many("ab" * 32, [KEY])
