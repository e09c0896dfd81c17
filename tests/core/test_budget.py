"""The budget of a process: never more is booked than there is, but for one call that has it alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.budget import Budget
from appliance.core.problems import Problem


@given(st.integers(1, 1000), st.lists(st.tuples(st.booleans(), st.integers(1, 1500)), max_size=50))
def test_what_is_booked_fits_unless_it_is_one_alone(limit: int, steps: list[tuple[bool, int]]) -> None:
    budget, booked = Budget(limit), list[int]()
    for gives, size in steps:
        if gives and booked:
            budget.release(booked.pop())
        elif budget.book(size):
            booked.append(size)
        else:
            assert booked
            assert budget.used + size > limit
        assert budget.used == sum(booked)
        assert budget.used <= limit or budget.used - max(booked) <= limit / 8


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_what_has_no_other_limit_does_not_grow_over_all_there_is(limit: int, first: int, more: int) -> None:
    budget = Budget(limit)
    assert budget.book(first)
    if first + more <= limit:
        assert budget.book(more, reserved=first, bounded=False)
        return
    with pytest.raises(Problem) as caught:
        budget.book(more, reserved=first, bounded=False)
    assert (caught.value.code, caught.value.retry_after_ms) == ("TOO_LARGE", None)
    assert budget.used == first
    assert budget.book(more, reserved=first)  # and what has one may, as long as no other call has anything


def test_a_refusal_says_how_much_of_what_and_when_to_try_again() -> None:
    refusal = Budget(1024 * 2**20, used=900 * 2**20).refusal(200 * 2**20)
    assert "200 MiB" in refusal.message
    assert "900 MiB of 1024 MiB" in refusal.message
    assert "memory_budget_mb" in refusal.message
    assert refusal.retry_after_ms
