"""What cached embeddings are not used any more: at once for every process, and then deleted in the store."""

from __future__ import annotations

import logging
from pathlib import Path

from appliance.core.cachekey import Purge
from appliance.core.cachestore import StoreFailed
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem
from appliance.drivers.purgefile import PurgeFile
from appliance.node import cachestores
from appliance.node.context import Node, now_ms

log = logging.getLogger(__name__)
FOR_EVER_MS = 2**53 - 1  # as JSON has it exactly
LATEST_MS = 10_000  # so long after it was computed an entry may come to the store


def purge(node: Node, fingerprint: str, since_ms: int, why: str, instance: str | None = None, grace_ms: int = 0) -> int:
    """Forget what was computed since then, until now; returns how many entries were deleted.

    fingerprint: empty for all. grace_ms: and so long from now on, because whoever computes it still does.
    Raises: Problem CACHE_NOT_CLEARED when they are out of use, and the store could not delete them yet.
    """
    purge = Purge(fingerprint, since_ms, now_ms() + grace_ms, why)
    purges = PurgeFile(Path(node.layout.purges))
    try:
        purges.add(purge)
    except OSError as error:
        raise Problem(Kind.UNAVAILABLE, "CACHE_NOT_CLEARED", f"Nothing was forgotten: {error}") from None
    try:
        # What is dated later was computed before the clock was set back.
        deleted = delete(node, purge._replace(until_ms=FOR_EVER_MS))
    except StoreFailed as failure:
        raise Problem(
            Kind.UNAVAILABLE,
            "CACHE_NOT_CLEARED",
            f"They are not used any more; the store could not delete them, and is asked again in a minute: {failure}",
        ) from None
    note(node, purge, deleted, instance)
    return deleted


def delete(node: Node, purge: Purge) -> int:
    """Delete in the store what a purge names. Raises: StoreFailed."""
    store = cachestores.opened(node.settings)
    if store is None:
        return 0
    try:
        return store.purge(purge.fingerprint, purge.since_ms, purge.until_ms)
    finally:
        store.close()


def note(node: Node, purge: Purge, deleted: int, instance: str | None) -> None:
    of = f" of the fingerprint {purge.fingerprint}" if purge.fingerprint else ""
    words = f"{deleted} cached embeddings{of} are forgotten: {purge.why}"
    node.journal.record(Event.CACHE_PURGED, instance, words, entries=deleted, fingerprint=purge.fingerprint)


def finish(node: Node) -> None:
    """Delete once more: what came to the store behind its purge, what it could not delete, what a multiplexer found."""
    purges = PurgeFile(Path(node.layout.purges))
    for purge in purges.undone():
        try:
            if deleted := delete(node, purge):
                note(node, purge, deleted, None)
            if purge.until_ms + LATEST_MS < now_ms():
                purges.mark_done(purge)
        except (StoreFailed, OSError) as failure:
            log.warning("Cached embeddings that are not used any more are still in the store: %s", failure)
