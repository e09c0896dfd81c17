"""Leases of replicas, shared or exclusive: a call that may end its replica is tried where no other call is."""

from __future__ import annotations

import threading
import time
from collections import Counter

from appliance.core.routing import Replica

REQUEST_SECS = 0.25  # so long after the last request for an exclusive lease a replica takes no new sharers
LONGEST_REQUEST_SECS = 5.0  # new sharers wait no longer for a request; then they have as much time themselves


class ReplicaLeases:
    """A shared or an exclusive lease of each replica, never waited for here. Thread-safe."""

    def __init__(self) -> None:
        self.shared: Counter[Replica] = Counter()
        self.exclusive: set[Replica] = set()
        self.requests: dict[Replica, tuple[float, float]] = {}  # for an exclusive lease: since, until
        self.lock = threading.Lock()

    def acquire(self, replica: Replica, exclusive: bool) -> bool:
        """Whether the lease was granted; `release` ends it. While an exclusive one is requested, no shared one is."""
        now = time.monotonic()
        with self.lock:
            if replica in self.exclusive or (not exclusive and self.is_requested(replica, now)):
                return False
            if not exclusive:
                self.shared[replica] += 1
                return True
            if self.shared[replica]:
                since, until = self.requests.get(replica, (now, 0.0))
                anew = until < now or now - since > 2 * LONGEST_REQUEST_SECS
                self.requests[replica] = (now if anew else since), now + REQUEST_SECS
                return False
            self.requests.pop(replica, None)
            self.exclusive.add(replica)
            return True

    def release(self, replica: Replica, exclusive: bool) -> None:
        with self.lock:
            if exclusive:
                self.exclusive.discard(replica)
            else:
                self.shared[replica] -= 1
                if not self.shared[replica]:
                    del self.shared[replica]

    def refuses_sharers(self, replica: Replica) -> bool:
        """Whether a shared lease would be refused now."""
        return replica in self.exclusive or self.is_requested(replica, time.monotonic())

    def is_requested(self, replica: Replica, now: float) -> bool:
        since, until = self.requests.get(replica, (0.0, 0.0))
        return until > now and now - since < LONGEST_REQUEST_SECS
