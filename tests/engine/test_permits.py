"""Permits of an engine: refused, waited for, released; idle only when nothing came since the last look."""

import threading
from concurrent.futures import CancelledError

import pytest

from appliance.core.problems import Kind, Problem
from appliance.engine.intake import Permits


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
