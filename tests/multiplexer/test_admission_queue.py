"""The queue in front of an instance, with real threads: order, bounds, deadlines, leaving, and no permit ever lost."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.core.settings import QueueSettings
from appliance.drivers.metrics import Meters
from appliance.multiplexer.admission_queue import AdmissionQueue, AdmissionQueues, BulkWaiter, QueueFull, SinglePermit
from testing.running import eventually

LONG_SECS = 10.0


def queue_of(capacity: int, max_size: int = 100, max_wait_ms: int = 10_000, share: float = 0.25) -> AdmissionQueue:
    queue = AdmissionQueue("small", QueueSettings(max_size=max_size, max_wait_ms=max_wait_ms, interactive_share=share))
    queue.resize(capacity)
    return queue


def never_gone(callback: Callable[[], None]) -> bool:
    return True


def counts(queue: AdmissionQueue) -> tuple[int, int, int, int]:
    return queue.lanes.interactive, queue.lanes.bulk, queue.lanes.waiting, len(queue.single_waiters)


class Caller(threading.Thread):
    """One single text: enters, stays until released, leaves."""

    def __init__(self, queue: AdmissionQueue, wait_secs: float | None = None) -> None:
        super().__init__(daemon=True)
        self.queue, self.wait_secs = queue, wait_secs
        self.inside, self.release, self.queued = threading.Event(), threading.Event(), threading.Event()
        self.leave: Callable[[], None] = lambda: None
        self.problem: Problem | None = None
        self.waited: bool | None = None
        self.took = 0.0
        self.start()

    def on_gone(self, callback: Callable[[], None]) -> bool:
        self.leave = callback
        self.queued.set()
        return True

    def run(self) -> None:
        began = time.monotonic()
        try:
            with SinglePermit() as permit:
                waited = permit.acquire(self.queue, self.wait_secs, self.on_gone)
                self.took, self.waited = time.monotonic() - began, waited
                self.inside.set()
                self.release.wait(LONG_SECS)
        except Problem as problem:
            self.took, self.problem = time.monotonic() - began, problem


def queued(queue: AdmissionQueue, number: int) -> list[Caller]:
    """Callers that wait, one behind the other."""
    callers = []
    for _ in range(number):
        caller = Caller(queue)
        assert caller.queued.wait(LONG_SECS)
        callers.append(caller)
    return callers


def done(*callers: Caller) -> None:
    for caller in callers:
        caller.release.set()
    for caller in callers:
        caller.join(LONG_SECS)
        assert not caller.is_alive()


def test_first_come_first_served() -> None:
    queue = queue_of(1)
    first = Caller(queue)
    assert first.inside.wait(LONG_SECS)
    waiting = queued(queue, 5)
    previous = first
    for at, caller in enumerate(waiting):
        previous.release.set()
        assert caller.inside.wait(LONG_SECS)
        assert not any(later.inside.is_set() for later in waiting[at + 1 :])
        assert caller.waited
        previous = caller
    done(first, *waiting)
    assert first.waited is False
    assert counts(queue) == (0, 0, 0, 0)


def test_the_queue_is_bounded_and_a_refusal_is_immediate() -> None:
    queue = queue_of(2, max_size=3)
    inside = [Caller(queue) for _ in range(2)]
    assert all(caller.inside.wait(LONG_SECS) for caller in inside)
    waiting = queued(queue, 3)
    began = time.monotonic()
    with pytest.raises(QueueFull) as caught:
        queue.acquire_single(None, never_gone)
    assert time.monotonic() - began < 0.05
    assert 10 <= (caught.value.retry_after_ms or 0) <= 60_000
    done(*inside, *waiting)
    assert counts(queue) == (0, 0, 0, 0)


def test_singles_that_come_together_get_all_permits_or_none() -> None:
    queue = queue_of(4)
    inside = Caller(queue)
    assert inside.inside.wait(LONG_SECS)
    assert not queue.try_acquire_singles(4)
    assert queue.try_acquire_singles(3)
    assert counts(queue) == (4, 0, 0, 0)
    (waiting,) = queued(queue, 1)
    queue.release(interactive=2)
    assert waiting.inside.wait(LONG_SECS)
    queue.release(interactive=1)
    done(inside, waiting)
    assert counts(queue) == (0, 0, 0, 0)


def test_who_may_not_wait_gets_a_permit_that_is_there_and_stands_in_nobody_s_way() -> None:
    queue = queue_of(1)
    with SinglePermit() as first, SinglePermit() as second:
        assert first.try_acquire(queue)
        assert not second.try_acquire(queue)
        assert counts(queue) == (1, 0, 0, 0)
        first.release()
        assert second.try_acquire(queue)
    assert counts(queue) == (0, 0, 0, 0)


def test_a_combined_call_without_permits_sends_nobody_away() -> None:
    """Each of its texts asks alone; who is refused then is not told a longer time for it."""
    queue = queue_of(1, max_size=0)
    inside = Caller(queue)
    assert inside.inside.wait(LONG_SECS)
    for _ in range(50):
        assert not queue.try_acquire_singles(1)
    with pytest.raises(QueueFull) as caught:
        queue.acquire_single(None, never_gone)
    assert caught.value.retry_after_ms == 100
    done(inside)


def test_a_deadline_counts_in_the_queue_and_frees_its_place() -> None:
    queue = queue_of(1, max_size=1)
    inside = Caller(queue)
    assert inside.inside.wait(LONG_SECS)
    late = Caller(queue, wait_secs=0.2)
    late.join(LONG_SECS)
    assert late.problem is not None
    assert late.problem.kind is Kind.TIMEOUT
    assert 0.2 <= late.took < 0.3
    assert counts(queue) == (1, 0, 0, 0)
    (next_one,) = queued(queue, 1)
    done(inside, next_one)
    assert next_one.waited


def test_a_queue_that_does_not_move_refuses_after_max_wait() -> None:
    queue = queue_of(0, max_wait_ms=150)
    caller = Caller(queue, wait_secs=5)
    caller.join(LONG_SECS)
    assert isinstance(caller.problem, QueueFull)
    assert 0.15 <= caller.took < 0.3
    assert counts(queue) == (0, 0, 0, 0)


def test_a_caller_that_goes_leaves_the_queue_at_once_and_the_next_moves_up() -> None:
    queue = queue_of(1)
    inside = Caller(queue)
    assert inside.inside.wait(LONG_SECS)
    first, second = queued(queue, 2)
    began = time.monotonic()
    first.leave()
    first.join(LONG_SECS)
    assert time.monotonic() - began < 0.1
    assert first.problem is not None
    assert counts(queue) == (1, 0, 1, 1)
    inside.release.set()
    assert second.inside.wait(LONG_SECS)
    done(inside, second)
    assert counts(queue) == (0, 0, 0, 0)


def test_a_caller_that_went_before_it_could_be_watched_does_not_wait() -> None:
    """grpc's add_callback answers False when the call has ended already, and never calls back."""
    queue = queue_of(0, max_wait_ms=1000)
    began = time.monotonic()
    with pytest.raises(Problem):
        queue.acquire_single(None, lambda callback: False)
    assert time.monotonic() - began < 0.5
    assert counts(queue) == (0, 0, 0, 0)


def test_a_permit_that_falls_to_a_caller_that_is_gone_goes_to_the_next() -> None:
    for _ in range(50):
        queue = queue_of(1)
        inside = Caller(queue)
        assert inside.inside.wait(LONG_SECS)
        first, second = queued(queue, 2)
        threads = [threading.Thread(target=first.leave), threading.Thread(target=inside.release.set)]
        for thread in threads:
            thread.start()
        first.release.set()  # should it have got in first
        assert second.inside.wait(LONG_SECS)
        done(inside, first, second)
        assert counts(queue) == (0, 0, 0, 0)


def test_replicas_that_come_let_in_as_many_as_they_take() -> None:
    queue = queue_of(0)
    waiting = queued(queue, 6)
    for capacity in (1, 3, 6):
        queue.resize(capacity)
        assert all(caller.inside.wait(LONG_SECS) for caller in waiting[:capacity])
        time.sleep(0.02)
        assert not any(caller.inside.is_set() for caller in waiting[capacity:])
    done(*waiting)
    assert counts(queue) == (0, 0, 0, 0)


def test_replicas_that_go_let_no_text_in_until_there_are_permits_again() -> None:
    queue = queue_of(4)
    inside = [Caller(queue) for _ in range(4)]
    assert all(caller.inside.wait(LONG_SECS) for caller in inside)
    queue.resize(2)
    (next_one,) = queued(queue, 1)
    done(*inside[:2])
    assert not next_one.inside.wait(0.05)
    done(inside[2])
    assert next_one.inside.wait(LONG_SECS)
    done(inside[3], next_one)
    assert counts(queue) == (0, 0, 0, 0)


def test_every_waiting_stream_moves_up_when_many_permits_come_at_once() -> None:
    queue = queue_of(1)
    assert queue.try_acquire_bulk(BulkWaiter(lambda: None), 1)
    got: list[float] = []
    threads = [
        threading.Thread(target=lambda: (queue.acquire_bulk(1, lambda: False), got.append(time.monotonic())))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not got
    queue.resize(1000)
    for thread in threads:
        thread.join(LONG_SECS)
    queue.release(bulk=21)
    assert counts(queue) == (0, 0, 0, 0)


def test_a_waiting_stream_that_is_over_takes_no_permit() -> None:
    queue = queue_of(1)
    assert queue.try_acquire_bulk(BulkWaiter(lambda: None), 1)
    gone = threading.Event()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(queue.acquire_bulk(1, gone.is_set)))
    thread.start()
    gone.set()
    thread.join(1)
    assert results == [False]
    assert counts(queue) == (0, 1, 0, 0)


def test_single_texts_find_permits_at_once_beside_batches() -> None:
    queue = queue_of(100, share=0.25)
    while queue.try_acquire_bulk(BulkWaiter(lambda: None), 5):
        pass
    assert counts(queue)[1] == 75
    with SinglePermit() as permit:
        assert not permit.acquire(queue, None, never_gone)
        assert not queue.try_acquire_bulk(BulkWaiter(lambda: None), 1)


def test_a_batch_moves_although_streams_never_stop() -> None:
    """Two streams that always have one text in work must not keep a slice out for ever."""
    queue = queue_of(32)
    over = threading.Event()

    def stream() -> None:
        while not over.is_set():
            if queue.acquire_bulk(1, over.is_set):
                time.sleep(0.005)
                queue.release(bulk=1)

    streams = [threading.Thread(target=stream) for _ in range(2)]
    for thread in streams:
        thread.start()
        time.sleep(0.002)
    deadline = time.monotonic() + 1
    moved = False
    waiter = BulkWaiter(lambda: None)
    while not moved and time.monotonic() < deadline:
        moved = queue.try_acquire_bulk(waiter, 64)
        time.sleep(0.005)
    over.set()
    for thread in streams:
        thread.join(LONG_SECS)
    assert moved


def test_after_a_storm_of_everything_at_once_no_permit_is_lost() -> None:
    queue = queue_of(5, max_size=10, max_wait_ms=60)
    seen: list[str] = []
    over = time.monotonic() + 1.5

    def single(choice: random.Random) -> None:
        callbacks: list[Any] = []

        def on_gone(callback: Callable[[], None]) -> bool:
            callbacks.append(callback)
            if choice.random() < 0.3:
                threading.Timer(choice.random() * 0.02, callback).start()
            return True

        try:
            with SinglePermit() as permit:
                permit.acquire(queue, choice.choice([None, 0.001, 0.02, 1.0]), on_gone)
                seen.append("in")
                time.sleep(choice.random() * 0.004)
                if choice.random() < 0.1:
                    raise KeyError
        except QueueFull:
            seen.append("full")
        except Problem as problem:
            seen.append(problem.kind.name)
        except KeyError:
            seen.append("error")

    def bulk(choice: random.Random) -> None:
        cost = choice.randint(1, 8)
        if choice.random() < 0.5:
            got = queue.try_acquire_bulk(BulkWaiter(lambda: None), cost)
        else:
            until = time.monotonic() + choice.random() * 0.02
            got = queue.acquire_bulk(cost, lambda: time.monotonic() > until)
        if got:
            seen.append("bulk")
            time.sleep(choice.random() * 0.003)
            queue.release(bulk=cost)

    def work(seed: int) -> None:
        choice = random.Random(seed)
        while time.monotonic() < over:
            kind = choice.random()
            if kind < 0.7:
                single(choice)
            elif kind < 0.97:
                bulk(choice)
            else:
                queue.resize(choice.choice([0, 1, 5, 20]))
            time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECS)
        assert not thread.is_alive()
    assert counts(queue) == (0, 0, 0, 0)
    assert {"in", "full", "bulk", "error", "TIMEOUT"} <= set(seen), {kind: seen.count(kind) for kind in set(seen)}
    queue.resize(1)
    with SinglePermit() as permit:
        assert not permit.acquire(queue, None, never_gone)


def test_the_metrics_have_an_instance_from_its_beginning_and_say_nothing_waits_when_it_is_gone(meters: Meters) -> None:
    queues = AdmissionQueues(QueueSettings(), meters)

    def waiting() -> float | None:
        labels = {"instance": "small", "lane": "bulk"}
        return meters.registry.get_sample_value("tei_manager_queue_size", labels)

    queues.keep_only({"small"})
    assert waiting() == 0
    meters.queue.labels("small", "bulk").set(3)
    queues.keep_only({"small"})
    assert waiting() == 3
    queues.keep_only(set())
    assert waiting() == 0


def test_the_metrics_tell_how_many_wait(meters: Meters) -> None:
    queues = AdmissionQueues(QueueSettings(), meters)
    queue = queues.get("small")
    queues.keep_only({"small"})  # it was asked for before it was known

    def waiting() -> float | None:
        labels = {"instance": "small", "lane": "interactive"}
        return meters.registry.get_sample_value("tei_manager_queue_size", labels)

    queues.measure()
    assert waiting() == 0
    with ThreadPoolExecutor(1) as threads:
        with SinglePermit() as permit:
            waits = threads.submit(permit.acquire, queue, 30.0, never_gone)
            eventually(lambda: queue.lanes.waiting)
            for _ in range(2):  # also where nothing has changed
                queues.measure()
                assert waiting() == 1
            queues.resize({"small": 1})
            assert waits.result(30)
        queues.measure()
        assert waiting() == 0
    assert queues.told.keys() == {"small"}
    queues.keep_only(set())
    assert queues.told == {}
