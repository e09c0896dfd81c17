"""Permits of an engine: refused, waited for, released; idle only when nothing came since the last look."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from appliance.core.problems import Kind, Problem
from appliance.engine.intake import Permits
from testing.running import eventually


def test_without_a_permit_a_text_is_refused_at_once() -> None:
    permits = Permits(1)
    permits.acquire_now()
    with pytest.raises(Problem) as refusal:
        permits.acquire_now()
    assert (refusal.value.kind, refusal.value.code) == (Kind.EXHAUSTED, "OVERLOADED")
    permits.release()
    permits.acquire_now()


def test_a_waiter_gets_the_permit_that_is_released() -> None:
    permits = Permits(1)
    permits.acquire_now()
    waiter = threading.Thread(target=permits.acquire, args=(lambda: False,))
    waiter.start()
    permits.release()
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    assert permits.free == 0


class Patient(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait()


def test_a_waiter_whose_caller_is_gone_wakes_the_next_one() -> None:
    """That one went on waiting for the end of its half second."""
    permits, is_gone = Permits(1), threading.Event()
    permits.changed = Patient()
    permits.acquire_now()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(permits.acquire, is_gone.is_set)
        eventually(lambda: len(permits.changed._waiters) == 1, 5)  # type: ignore[attr-defined]
        second = threads.submit(permits.acquire, lambda: False)
        eventually(lambda: len(permits.changed._waiters) == 2, 5)  # type: ignore[attr-defined]
        is_gone.set()
        permits.release()
        try:
            second.result(5)
        finally:
            permits.release()  # so that the thread ends
    assert isinstance(first.exception(), CancelledError)


def test_a_waiter_whose_caller_is_gone_takes_no_permit() -> None:
    permits = Permits(1)
    with pytest.raises(CancelledError):
        permits.acquire(lambda: True)
    assert permits.free == 1


def test_idle_means_that_nothing_came_since_the_last_look() -> None:
    permits = Permits(2)
    assert permits.idle()
    permits.acquire_now()
    assert not permits.idle()
    permits.release()
    permits.acquire_now()
    permits.release()
    assert not permits.idle()
    assert permits.idle()
