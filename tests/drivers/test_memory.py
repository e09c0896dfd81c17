"""The memory of a process: threads share its budget, and one of them alone collects garbage."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from appliance.core.problems import Problem
from appliance.drivers import memory
from appliance.drivers.memory import Reserve
from testing.running import eventually


def test_what_does_not_fit_waits_until_something_is_released() -> None:
    reserve = Reserve(100)
    first, second = reserve.reservation(80), reserve.reservation()
    waiter = threading.Thread(target=second.grow, args=(50, True, 10.0))
    waiter.start()
    first.release()
    waiter.join(timeout=5)
    assert not waiter.is_alive()
    assert reserve.budget.used == 50


def test_what_does_not_fit_in_time_is_refused_and_books_nothing() -> None:
    reserve = Reserve(100)
    with reserve.reservation(80), reserve.reservation() as late:
        began = time.monotonic()
        with pytest.raises(Problem):
            late.grow(50, wait_secs=0.1)
        assert 0.1 <= time.monotonic() - began < 1
        assert reserve.budget.used == 80
    assert reserve.budget.used == 0


def test_what_was_released_books_nothing_any_more() -> None:
    reserve = Reserve(100)
    reservation = reserve.reservation(30)
    reservation.shrink(10)
    reservation.release()
    reservation.release()
    reservation.grow(10)
    assert reserve.budget.used == 0


def test_what_is_released_while_it_waits_for_more_books_nothing() -> None:
    reserve = Reserve(100)
    holder, ours = reserve.reservation(90), reserve.reservation(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.grow, 60, wait_secs=10)
        eventually(waiting.running)
        ours.release()
        holder.release()
        waiting.result(5)
    assert reserve.budget.used == 0


def test_what_was_released_is_not_released_again_by_a_thread_that_comes_late() -> None:
    reserve = Reserve(100)
    other, reservation = reserve.reservation(40), reserve.reservation(30)
    reservation.release()
    reservation.shrink(30)
    assert reserve.budget.used == 40
    other.release()


@pytest.fixture
def by_hand() -> Iterator[None]:
    memory.freeze_startup_objects()
    memory.disable_automatic_collection()
    yield
    gc.enable()
    gc.unfreeze()


def test_garbage_ends_only_in_the_thread_that_collects(by_hand: None) -> None:
    """What ends may take a lock that the thread holds in which Python happens to collect."""
    ended_in: list[str] = []

    class Answers:
        def __del__(self) -> None:
            ended_in.append(threading.current_thread().name)

    def leave_garbage() -> None:
        for _ in range(2000):
            cycle: list[object] = [Answers()]
            cycle.append(cycle)

    other = threading.Thread(target=leave_garbage, name="other")
    other.start()
    other.join()
    assert ended_in == []
    assert memory.collect_young()
    assert set(ended_in) == {threading.current_thread().name}
    assert len(ended_in) == 2000


def test_little_garbage_is_left_for_later(by_hand: None) -> None:
    gc.collect()
    looked: list[str] = []
    gc.callbacks.append(lambda phase, _: looked.append(phase))
    try:
        assert not memory.collect_young()
        assert looked == []
        memory.collect_and_trim()
        assert looked == ["start", "stop"]
    finally:
        gc.callbacks.pop()
