"""The queue in front of one instance: `core.admission` decides, threads wait here for their permits.

A permit is the right to have one text in work at the replicas of the instance.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from appliance.core.admission import Lanes, Verdict
from appliance.core.problems import Kind, Problem
from appliance.core.settings import QueueSettings
from appliance.drivers.metrics import Meters
from appliance.multiplexer.cooperation import WouldBlock

BULK_POLL_SECS = 0.1  # how often a waiting stream looks whether its caller is still there


class QueueFull(Problem):
    """Refused for want of permits."""

    def __init__(self, instance: str, waited: bool, retry_after_ms: int) -> None:
        why = "its queue did not move in time" if waited else "its queue is full"
        super().__init__(
            Kind.EXHAUSTED,
            "QUEUE_FULL",
            f'Instance "{instance}" is busy and {why}: try again in {retry_after_ms} ms',
            retry_after_ms,
        )


class SingleWaiter:
    """A single text that waits; ``decided`` is set when it has its permit, or when its caller is gone."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        self.admitted = False
        self.gone = False

    def leave(self) -> None:
        self.gone = True
        self.decided.set()


class BulkWaiter:
    """A batch or a stream that waits for permits; ``wake`` is called when it should try again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class AdmissionQueue:
    """The permits of one instance in this process. Thread-safe."""

    def __init__(self, instance: str, settings: QueueSettings) -> None:
        self.instance = instance
        self.max_wait_secs = settings.max_wait_ms / 1000
        self.lanes = Lanes(0, settings.max_size, settings.interactive_share)
        self.single_waiters: deque[SingleWaiter] = deque()
        self.lock = threading.Lock()
        self.bulk_waiters: deque[BulkWaiter] = deque()  # first come, first served

    def resize(self, capacity: int) -> None:
        """Replicas came or went."""
        with self.lock:
            if capacity != self.lanes.capacity:
                self.lanes.capacity = capacity
                self.admit_waiters()

    def acquire_single(self, wait_secs: float | None, on_gone: Callable[[Callable[[], None]], object]) -> bool:
        """The permit of one text; whether it had to be waited for.

        wait_secs: the caller's deadline; on_gone registers what to call when the caller is gone.
        Raises: QueueFull; Problem timeout when the deadline passes in the queue.
        """
        with self.lock:
            verdict = self.lanes.verdict_on_single()
            if verdict is Verdict.REFUSE:
                raise QueueFull(self.instance, False, self.lanes.count_refusal(time.monotonic()))
            if verdict is Verdict.ADMIT:
                if self.lanes.idle:
                    self.lanes.begin_work(time.monotonic())
                self.lanes.interactive += 1
                return False
            waiter = SingleWaiter()
            self.single_waiters.append(waiter)
            self.lanes.waiting += 1
        if on_gone(waiter.leave) is False:  # gone already
            waiter.leave()
        longest_secs = min(self.max_wait_secs, wait_secs if wait_secs is not None else self.max_wait_secs)
        waiter.decided.wait(longest_secs)
        with self.lock:
            if waiter.admitted and not waiter.gone:
                return True
            if waiter.admitted:  # admitted and gone at once: the permit goes to the next
                self.lanes.interactive -= 1
                self.admit_waiters()
            else:
                self.single_waiters.remove(waiter)
                self.lanes.waiting -= 1
        if waiter.gone:
            raise Problem(Kind.UNAVAILABLE, "CANCELLED", "The caller is gone")
        if wait_secs is not None and wait_secs <= self.max_wait_secs:
            raise Problem(Kind.TIMEOUT, "TIMEOUT", f'The deadline passed in the queue of instance "{self.instance}"')
        with self.lock:
            raise QueueFull(self.instance, True, self.lanes.count_refusal(time.monotonic()))

    def try_acquire_singles(self, texts: int) -> bool:
        """The permits of so many single texts, if nobody waits and all are there now."""
        with self.lock:
            if not self.lanes.admits_singles(texts):
                return False
            if self.lanes.idle:
                self.lanes.begin_work(time.monotonic())
            self.lanes.interactive += texts
            return True

    def retry_after_ms(self) -> int:
        """When a caller may try again that the replica itself has refused."""
        with self.lock:
            return self.lanes.count_refusal(time.monotonic())

    def try_acquire_bulk(self, waiter: BulkWaiter, texts: int) -> bool:
        """Permits for ``texts`` texts, if there are so many now and no other waiter was first.

        Otherwise the waiter is queued, and its `wake` is called as soon as it should try again.
        """
        with self.lock:
            first = not self.bulk_waiters or self.bulk_waiters[0] is waiter
            if first and self.lanes.admits_bulk(texts):
                if self.lanes.idle:
                    self.lanes.begin_work(time.monotonic())
                self.lanes.bulk += texts
                if self.bulk_waiters and self.bulk_waiters[0] is waiter:
                    self.bulk_waiters.popleft()
                    self.wake_first_bulk()
                return True
            if waiter not in self.bulk_waiters:
                self.bulk_waiters.append(waiter)
            return False

    def withdraw(self, waiter: BulkWaiter) -> None:
        """The waiter wants no permit any more."""
        with self.lock:
            if waiter in self.bulk_waiters:
                self.bulk_waiters.remove(waiter)
                self.wake_first_bulk()

    def acquire_bulk(self, texts: int, cancelled: Callable[[], bool]) -> bool:
        """Permits for ``texts`` texts, as soon as there are so many; False when ``cancelled`` turned true first."""
        woken = threading.Event()
        waiter = BulkWaiter(woken.set)
        while not self.try_acquire_bulk(waiter, texts):
            if cancelled():
                self.withdraw(waiter)
                return False
            woken.wait(timeout=BULK_POLL_SECS)
            woken.clear()
        return True

    def wake_first_bulk(self) -> None:
        """Under the lock."""
        if self.bulk_waiters:
            self.bulk_waiters[0].wake()

    def release(self, interactive: int = 0, bulk: int = 0, begins_anew: bool = False) -> None:
        """End so many permits: their texts are answered, or will not be, or begin anew."""
        with self.lock:
            self.lanes.interactive -= interactive
            self.lanes.bulk -= bulk
            if not begins_anew:
                self.lanes.count_answers(interactive + bulk, time.monotonic())
            self.admit_waiters()

    def admit_waiters(self) -> None:
        """Give permits to single texts that wait, as far as there are any. Under the lock."""
        while self.single_waiters and self.lanes.admits_single:
            waiter = self.single_waiters.popleft()
            self.lanes.waiting -= 1
            self.lanes.interactive += 1
            waiter.admitted = True
            waiter.decided.set()
        self.wake_first_bulk()


class SinglePermit:
    """The permit of one text, of one queue after the other; a context manager that releases it."""

    def __init__(self) -> None:
        self.queue: AdmissionQueue | None = None

    def acquire(
        self, queue: AdmissionQueue, wait_secs: float | None, on_gone: Callable[[Callable[[], None]], object]
    ) -> bool:
        """That of ``queue``, and no other any more. Result and errors are those of `acquire_single`."""
        self.release()
        waited = queue.acquire_single(wait_secs, on_gone)
        self.queue = queue
        return waited

    def try_acquire(self, queue: AdmissionQueue) -> bool:
        """As `acquire`, if it need not be waited for."""
        self.release()
        if acquired := queue.try_acquire_singles(1):
            self.queue = queue
        return acquired

    def release(self, begins_anew: bool = False) -> None:
        if self.queue:
            self.queue.release(interactive=1, begins_anew=begins_anew)
            self.queue = None

    def __enter__(self) -> SinglePermit:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.release(begins_anew=failed is WouldBlock)


class QueueLengths(NamedTuple):
    """How many wait, by the names of the lanes in the metrics."""

    interactive: int
    bulk: int


class AdmissionQueues:
    """The queue of each instance. Read from any thread; `keep_only` is called by one at a time."""

    def __init__(self, settings: QueueSettings, meters: Meters) -> None:
        self.settings = settings
        self.meters = meters
        self.queues: dict[str, AdmissionQueue] = {}
        self.told: dict[str, QueueLengths] = {}  # by the metrics

    def get(self, instance: str) -> AdmissionQueue:
        queue = self.queues.get(instance)
        return queue or self.queues.setdefault(instance, AdmissionQueue(instance, self.settings))

    def keep_only(self, instances: Collection[str]) -> None:
        """These have a queue, and no others. The metrics say 0 of one that is new, and of one that is gone."""
        for name in self.queues.keys() ^ set(instances):
            self.tell(name, QueueLengths(0, 0))
        self.queues = {name: self.get(name) for name in sorted(instances)}
        self.told = {name: lengths for name, lengths in self.told.items() if name in self.queues}

    def resize(self, capacities: Mapping[str, int]) -> None:
        """capacities: texts that the ready replicas of an instance take at once."""
        for name, queue in list(self.queues.items()):
            if queue.lanes.capacity != capacities[name]:
                queue.resize(capacities[name])

    def measure(self) -> None:
        """How many wait in each queue, for the metrics."""
        for name, queue in list(self.queues.items()):
            lengths = QueueLengths(queue.lanes.waiting, len(queue.bulk_waiters))
            if lengths != self.told.get(name):  # of 100 instances nearly all are idle
                self.tell(name, lengths)

    def tell(self, name: str, lengths: QueueLengths) -> None:
        for lane, length in lengths._asdict().items():
            self.meters.queue.labels(name, lane).set(length)
        self.told[name] = lengths
