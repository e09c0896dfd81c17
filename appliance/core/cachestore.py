"""What a store of cached embeddings is: bytes by key, for each fingerprint apart. Drivers keep them.

A store never answers late or wrong for want of its medium: what it cannot do raises `StoreFailed`, which the cache
takes for a miss, and which ends no call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Failure(StrEnum):
    """Why a store cannot do what it is asked; the label of the metric."""

    FULL = "full"  # the disk, or the store's own memory
    READ_ONLY = "read_only"
    AWAY = "away"  # nobody answers
    SLOW = "slow"  # it took longer than it may
    DAMAGED = "damaged"  # what could not be read was deleted, and is begun anew
    REFUSED = "refused"  # wrong password, wrong version: see the words


class StoreFailed(Exception):
    def __init__(self, failure: Failure, words: str) -> None:
        super().__init__(words)
        self.failure = failure


@dataclass(frozen=True)
class StoreStats:
    """Of all processes that use it. entries: None where the store cannot tell them cheaply; sizes in bytes. refusal:
    why it can be read and takes nothing new, where that is so and the store can tell."""

    entries: int | None
    size: int | None
    refusal: str = ""


class Store(Protocol):
    """Keys are digests of `cachekey.KEY_BYTES`; values are packed entries; a fingerprint is its digest in hex.

    Thread-safe. All but ``close`` raise StoreFailed. evicted: entries that this process has dropped to make room.
    """

    evicted: int

    def get_many(self, fingerprint: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values that are there."""

    def put_many(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        """Keep the values; those of the same keys are replaced. All or none, as far as the store can."""

    def purge(self, fingerprint: str, since_ms: int, until_ms: int) -> int:
        """Delete what was computed in this time; returns how many. An empty fingerprint means all of them."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...
