"""Limits that end while others begin, from whatever thread and in the midst of whatever it does."""

import gc
import threading
import time
from collections.abc import Iterator

from appliance.drivers.grpccalls import TimeLimits
from testing.running import eventually


def holding(limits: TimeLimits, number: int) -> Iterator[None]:
    """An answer that nobody takes any more: its limit ends when it is collected."""
    try:
        yield
    finally:
        limits.end(number)


class Collecting(float):
    """Seconds. When they are added to the time, all garbage is collected, as Python may at any moment."""

    def __radd__(self, other: float) -> float:
        gc.collect()
        return other + float(self)


def test_garbage_ends_its_limit_while_another_one_begins() -> None:
    limits = TimeLimits()
    answers = holding(limits, limits.begin(60.0, lambda: None))
    next(answers)
    cycle: list[object] = [answers]
    cycle.append(cycle)
    del answers, cycle
    thread = threading.Thread(target=lambda: limits.begin(Collecting(60), lambda: None), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for itself"
    assert len(limits.limits) == 1


def test_what_is_late_is_given_up_once_and_what_has_ended_is_not() -> None:
    limits, given_up = TimeLimits(), []
    limits.begin(0.0, lambda: given_up.append("late"))
    limits.end(limits.begin(0.0, lambda: given_up.append("ended")))
    kept = limits.begin(60.0, lambda: given_up.append("kept"))
    eventually(lambda: given_up)
    time.sleep(0.5)
    assert given_up == ["late"]
    assert list(limits.limits) == [kept]
