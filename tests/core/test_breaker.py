"""After a failure nobody asks for a pause; then one call does."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from appliance.core.breaker import Breaker
from testing.specs import LAW


def test_a_failure_ends_calls_until_the_pause_is_over() -> None:
    breaker = Breaker(1.0)
    assert breaker.admits(0.0)
    breaker.failed(10.0, "nobody answers")
    assert not breaker.admits(10.0)
    assert not breaker.admits(10.999)
    assert breaker.words == "nobody answers"


def test_one_call_probes_and_the_others_wait_for_its_end() -> None:
    breaker = Breaker(1.0)
    breaker.failed(10.0, "")
    assert [breaker.admits(11.0), breaker.admits(11.0), breaker.admits(11.5)] == [True, False, False]
    breaker.succeeded()
    assert breaker.admits(11.5)
    assert breaker.admits(11.5)


def test_a_probe_that_never_ends_is_followed_by_another() -> None:
    breaker = Breaker(1.0)
    breaker.failed(10.0, "")
    assert [breaker.admits(time) for time in (11.0, 11.9, 12.0, 12.1)] == [True, False, True, False]


@LAW
@given(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=200))
def test_a_store_that_always_fails_is_asked_at_most_once_in_a_pause(steps: list[float]) -> None:
    breaker, now, asked = Breaker(1.0), 0.0, []
    for step in steps:
        now += step
        if breaker.admits(now):
            asked.append(now)
            breaker.failed(now, "")
    assert all(after >= before + 1.0 for before, after in pairwise(asked))
