"""Which replicas somebody has for himself: a call that may end its replica is tried where no other call is."""

from __future__ import annotations

import threading
import time
from collections import Counter

from appliance.core.routing import Replica

WANTED_SECS = 0.25  # so long after the last try to have a replica alone it takes new calls again
LONGEST_WANTED_SECS = 5.0  # so long at most new calls wait for one who wants it alone; then they have as long a turn


class ExclusiveReplicas:
    """A shared or an exclusive lease of each replica, never waited for here. Thread-safe."""

    def __init__(self) -> None:
        self.shared: Counter[Replica] = Counter()
        self.alone: set[Replica] = set()
        self.wanted: dict[Replica, tuple[float, float]] = {}  # somebody waits to have it alone: since, until
        self.lock = threading.Lock()

    def enter(self, replica: Replica, alone: bool) -> bool:
        """Whether the lease was given; `leave` gives it back. New sharers wait for one who wants the replica alone."""
        now = time.monotonic()
        with self.lock:
            if replica in self.alone or (not alone and self.is_wanted(replica, now)):
                return False
            if not alone:
                self.shared[replica] += 1
                return True
            if self.shared[replica]:
                since, until = self.wanted.get(replica, (now, 0.0))
                anew = until < now or now - since > 2 * LONGEST_WANTED_SECS
                self.wanted[replica] = (now if anew else since), now + WANTED_SECS
                return False
            self.wanted.pop(replica, None)
            self.alone.add(replica)
            return True

    def leave(self, replica: Replica, alone: bool) -> None:
        with self.lock:
            if alone:
                self.alone.discard(replica)
            else:
                self.shared[replica] -= 1
                if not self.shared[replica]:
                    del self.shared[replica]

    def closed(self, replica: Replica) -> bool:
        """Whether it takes no sharers just now."""
        return replica in self.alone or self.is_wanted(replica, time.monotonic())

    def is_wanted(self, replica: Replica, now: float) -> bool:
        since, until = self.wanted.get(replica, (0.0, 0.0))
        return until > now and now - since < LONGEST_WANTED_SECS
