"""Entries on their way to the store: no answer waits for the disk.

An entry is found here from the moment it is computed until a while after it was stored, so that nobody computes it a
second time in between. What does not fit while the store is slow is dropped: it will be a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from appliance.core.cachestore import Store, StoreFailed

FLUSH_SECS = 0.05  # at most so long after the first entry all are written
MOST_AT_ONCE = 2000  # entries of one transaction
MOST_BYTES = 64 * 1024 * 1024  # of entries that wait
PAUSE_SECS = 1.0  # after a failure


class CacheWriter:
    """One thread. on_failure: called with each failure of the store; on_success: after a batch was stored."""

    def __init__(self, store: Store, on_failure: Callable[[StoreFailed], None], on_success: Callable[[], None]) -> None:
        self.store = store
        self.on_failure = on_failure
        self.on_success = on_success
        self.waiting: dict[str, dict[bytes, bytes]] = {}  # by fingerprint
        self.stored: dict[str, dict[bytes, bytes]] = {}  # with the last batch
        self.waiting_bytes = 0
        self.lock = threading.Lock()
        self.news = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.ended = False
        self.thread = threading.Thread(target=self.work, name="cache-writer", daemon=True)
        self.thread.start()

    def offer(self, fingerprint: str, values: Mapping[bytes, bytes]) -> None:
        """Values to be stored soon."""
        size = sum(map(len, values.values()))
        with self.lock:
            if self.waiting_bytes + size > MOST_BYTES:
                return
            self.waiting_bytes += size
            self.waiting.setdefault(fingerprint, {}).update(values)
            self.idle.clear()
        self.news.set()

    def found(self, fingerprint: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values that were offered and may not be in the store yet."""
        found: dict[bytes, bytes] = {}
        for some in (self.waiting, self.stored):  # in the order in which they pass through them
            if values := some.get(fingerprint):
                found = {key: value for key in keys if (value := values.get(key))} | found
        return found

    def work(self) -> None:
        while not self.ended:
            self.news.wait()
            self.news.clear()
            time.sleep(FLUSH_SECS)  # for more of them
            while self.flush() and not self.ended:
                pass

    def flush(self) -> bool:
        """Store a batch; whether there is more."""
        with self.lock:
            batch = self.stored = self.waiting  # before they wait no more: `found` looks without the lock
            self.waiting, self.waiting_bytes = {}, 0
        try:
            for fingerprint, values in batch.items():
                items = list(values.items())
                for begin in range(0, len(items), MOST_AT_ONCE):
                    self.store.put_many(fingerprint, dict(items[begin : begin + MOST_AT_ONCE]))
            if batch:
                self.on_success()
        except StoreFailed as failure:  # these are lost; they will be misses
            self.on_failure(failure)
            time.sleep(PAUSE_SECS)
        with self.lock:
            if not self.waiting:
                self.idle.set()
                return False
            return True

    def stop(self, within_secs: float) -> None:
        """Store what waits."""
        self.idle.wait(within_secs)
        self.ended = True
        self.news.set()
