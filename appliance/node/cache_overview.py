"""What is true of the cache now: its store, what it has saved, and which instances use it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.core.cachekey import Fingerprint
from appliance.core.cachestore import StoreFailed, StoreStats
from appliance.core.problems import Kind, Problem, quoted
from appliance.core.state import Instance
from appliance.core.status import ALIVE
from appliance.drivers import metrics, processes
from appliance.node import cachestores
from appliance.node.context import Node
from appliance.node.fingerprints import Known

READING_SECS, POLL_SECS = 20.0, 0.05


@dataclass(frozen=True)
class InstanceCacheView:
    """One instance. why: nothing of it is cached, where that is so."""

    name: str
    cached: bool
    fingerprint: str | None
    why: str | None


@dataclass(frozen=True)
class CacheView:
    """Counts are of all multiplexer processes, since the data folder was made. failure: of the store, just now."""

    enabled: bool
    store: str
    scope: str
    max_mb: int
    ttl_secs: int
    entries: int | None
    size_bytes: int | None
    hits: int
    misses: int
    bypassed: int
    joined: int
    saved_secs: float
    failure: str | None
    instances: tuple[InstanceCacheView, ...]

    def mapping(self) -> dict[str, Any]:
        return {**asdict(self), "instances": [asdict(each) for each in self.instances]}


def known_of(node: Node, instance: Instance) -> Known:
    """What is known of an instance's fingerprint. Without supervisord: as if none of its processes ran."""
    names = [instance.process(index) for index in range(instance.spec.replicas)]
    try:
        members = node.supervisor.members(instance.name, names)
    except Problem:
        members = []
    pids = [each.pid for each in members if each.state in ALIVE and each.pid]
    return node.fingerprints.of(instance, [began for pid in pids if (began := processes.started(pid))])


def require_fingerprint(node: Node, name: str) -> Fingerprint:
    """Waits while files are read for it. Raises: Problem not_found, or FINGERPRINT_UNKNOWN with the reason."""
    until = time.monotonic() + READING_SECS
    while (known := known_of(node, node.state.read().get(name))).pending and time.monotonic() < until:
        time.sleep(POLL_SECS)
    if known.fingerprint is None:
        raise Problem(
            Kind.CONFLICT, "FINGERPRINT_UNKNOWN", f"The fingerprint of {quoted(name)} is not known now: {known.why}"
        )
    return known.fingerprint


def compatibility(node: Node, one: str, other: str) -> dict[str, Any]:
    """Whether vectors of two instances go together, and which parts of their fingerprints differ. Raises: Problem."""
    first, second = require_fingerprint(node, one), require_fingerprint(node, other)
    return {
        "compatible": first == second,
        "differing": first.differing(second),
        "a": {"instance": one, "fingerprint": first.digest, "parts": dict(first.parts)},
        "b": {"instance": other, "fingerprint": second.digest, "parts": dict(second.parts)},
    }


def show(node: Node) -> CacheView:
    """Raises: Problem while the state cannot be read."""
    settings = node.settings.cache
    stats, failure = StoreStats(None, None), None
    try:
        if store := cachestores.opened(node.settings):
            try:
                stats = store.stats()
            finally:
                store.close()
    except (StoreFailed, Problem) as problem:
        failure = str(problem)
    counts = metrics.totals(Path(node.layout.metrics), "cache_")
    instances = [instance_view(node, each) for each in node.state.read().instances.values()]
    return CacheView(
        enabled=settings.on,
        store=settings.store,
        scope=settings.scope,
        max_mb=settings.max_mb,
        ttl_secs=settings.ttl_secs,
        entries=stats.entries,
        size_bytes=stats.size,
        hits=int(counts.get(("cache_lookups", "hit"), 0)),
        misses=int(counts.get(("cache_lookups", "miss"), 0)),
        bypassed=int(counts.get(("cache_lookups", "bypass"), 0)),
        joined=int(counts.get(("cache_joins", ""), 0)),
        saved_secs=round(counts.get(("cache_saved_seconds", ""), 0.0), 3),
        failure=failure or stats.refusal or None,
        instances=tuple(instances),
    )


def instance_view(node: Node, instance: Instance) -> InstanceCacheView:
    known = known_of(node, instance)
    if not node.settings.cache.on:
        why: str | None = "the cache is off ([cache] of the configuration)"
    elif not instance.spec.cache:
        why = "the instance has cache = false"
    else:
        why = known.why or None
    return InstanceCacheView(instance.name, why is None, known.digest, why)
