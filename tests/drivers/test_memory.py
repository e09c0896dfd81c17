"""Threads that share the budget of their process: what does not fit waits, and what is released is used again."""

import threading
import time

import pytest

from appliance.core.problems import Problem
from appliance.drivers.memory import Reserve


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


def test_what_was_released_is_not_released_again_by_a_thread_that_comes_late() -> None:
    reserve = Reserve(100)
    other, reservation = reserve.reservation(40), reserve.reservation(30)
    reservation.release()
    reservation.shrink(30)
    assert reserve.budget.used == 40
    other.release()
