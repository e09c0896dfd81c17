"""The store of cached embeddings that the configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from appliance.core.cachestore import Store, StoreFailed
from appliance.core.problems import invalid
from appliance.core.settings import CacheSettings, Settings

MIB = 1024 * 1024
PACKAGES = {"redis": "redis", "qdrant": "qdrant_client"}
log = logging.getLogger(__name__)


def opened(settings: Settings, on_damage: Callable[[str], None] = log.warning) -> Store | None:
    """None where there is no cache. Nothing is connected to yet. on_damage: told what was deleted because it could not
    be read. Raises: Problem where the package of the store is not installed."""
    cache = settings.cache
    if not cache.on:
        return None
    if cache.store == "sqlite":
        from appliance.drivers.sqlitestore import SqliteStore

        return SqliteStore(Path(settings.layout.cached_entries), cache.max_mb * MIB, on_damage)
    if find_spec(PACKAGES[cache.store]) is None:
        raise invalid(
            f'"cache.store" is "{cache.store}", whose client is not installed: pip install \'.[{cache.store}]\' in the '
            "source of the appliance"
        )
    try:
        return remote(cache)
    except StoreFailed as failure:
        raise invalid(f'"cache.url" cannot be used: {failure}') from None


def remote(cache: CacheSettings) -> Store:
    """Raises: StoreFailed for an address that cannot be read."""
    if cache.store == "redis":
        from appliance.drivers.redisstore import RedisStore

        return RedisStore(cache.url, ttl_secs=cache.ttl_secs)
    from appliance.drivers.qdrantstore import QdrantStore

    return QdrantStore(cache.url)
