"""Which calls are suspected of ending replicas, which have been convicted of it, and which methods are given up.

Theory of operation. Some requests end the process that computes them. To send such a call to the next replica, and to
the one after, would end them all; to drop every call that a dying replica had in work would fail many innocents. So:

    observed                                          then
    a replica dies with calls in flight               each of them is a suspect
    a suspect, now or when it comes again             is tried alone: no other call is on that replica meanwhile, and
                                                      one suspect at a time, so that other replicas are out of its reach
    a suspect that was tried alone is answered        free
    a replica dies with a suspect that is alone       convicted: refused without reaching a replica, for CONVICTED_SECS
    two convicted requests of one method, which has   the method is refused, for as long as this launch lasts
    answered nothing in this launch

A suspect that does not come again is forgotten. A call is entries by the digest of its method and its bytes. One
`Suspects` is about one launch of one instance: a new launch begins with a clean record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SUSPECTED_SECS = 120.0
CONVICTED_SECS = 600.0
MOST_REMEMBERED = 10_000  # of each kind; the oldest go first


class Standing(StrEnum):
    FREE = "free"
    SUSPECT = "suspect"
    CONVICTED = "convicted"
    METHOD_REFUSED = "method refused"


@dataclass
class Suspects:
    """Of one launch of one instance, as one process has seen it. Not thread-safe. now: seconds of a steady clock."""

    suspected: dict[bytes, float] = field(default_factory=dict)  # digest -> until when
    convicted: dict[bytes, float] = field(default_factory=dict)
    killers: dict[str, set[bytes]] = field(default_factory=dict)  # method -> its convicted requests
    answered: set[str] = field(default_factory=set)  # methods

    @property
    def clean(self) -> bool:
        """Nothing is suspected or refused, so that no call has to be looked up."""
        return not (self.suspected or self.convicted or (self.killers and self.refused_methods))

    @property
    def refused_methods(self) -> set[str]:
        killers = list(self.killers.items())  # `clean` is asked without a lock
        return {method for method, requests in killers if len(requests) > 1} - self.answered

    def standing(self, method: str, digest: bytes, now: float) -> Standing:
        expire(self.suspected, now)
        expire(self.convicted, now)
        if method in self.refused_methods:
            return Standing.METHOD_REFUSED
        if self.convicted.get(digest, now) > now:
            return Standing.CONVICTED
        return Standing.SUSPECT if self.suspected.get(digest, now) > now else Standing.FREE

    def suspect(self, digest: bytes, now: float) -> None:
        remember(self.suspected, digest, now, now + SUSPECTED_SECS)

    def acquit(self, digest: bytes) -> None:
        self.suspected.pop(digest, None)

    def convict(self, method: str, digest: bytes, now: float) -> None:
        self.suspected.pop(digest, None)
        remember(self.convicted, digest, now, now + CONVICTED_SECS)
        if method not in self.answered:
            self.killers.setdefault(method, set()).add(digest)


def remember(entries: dict[bytes, float], digest: bytes, now: float, until: float) -> None:
    """All entries of one kind are remembered equally long, so the oldest, which are in front, end first."""
    entries.pop(digest, None)
    entries[digest] = until
    expire(entries, now)
    while len(entries) > MOST_REMEMBERED:
        del entries[next(iter(entries))]


def expire(entries: dict[bytes, float], now: float) -> None:
    while entries and entries[first := next(iter(entries))] <= now:
        del entries[first]
