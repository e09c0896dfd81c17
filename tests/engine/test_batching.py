"""The queue: every item comes out once, batches keep their bounds, the oldest is always in the next batch."""

import math
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.batching import GPU_SLACK, GPU_WASTE, GROW_SECS, SLACK, WASTE, LengthQueue

LENGTHS = st.lists(st.integers(1, 600), max_size=120)


def drained(queue: LengthQueue, lengths: list[int], token_secs: float = math.inf) -> list[list[tuple[int, int]]]:
    for number, length in enumerate(lengths):
        queue.put(length, (number, length))
    batches = []
    while batch := queue.next_batch(token_secs):
        batches.append(batch)
    return batches


@settings(derandomize=True)
@given(LENGTHS, st.integers(1, 1024), st.integers(1, 40), st.booleans())
def test_every_item_comes_out_exactly_once(lengths: list[int], budget: int, most: int, by_length: bool) -> None:
    batches = drained(LengthQueue(budget, most, by_length), lengths)
    assert sorted(number for batch in batches for number, _ in batch) == list(range(len(lengths)))
    assert all(len(batch) <= most for batch in batches)


@settings(derandomize=True)
@given(LENGTHS, st.integers(1, 1024))
def test_batches_by_length_keep_budget_and_waste(lengths: list[int], budget: int) -> None:
    for batch in drained(LengthQueue(budget, 1000, True), lengths):
        sizes = [length for _, length in batch]
        assert len(sizes) == 1 or len(sizes) * max(sizes) <= budget
        assert max(sizes) - min(sizes) <= max(SLACK, WASTE * max(sizes))


def test_a_few_texts_are_spread_over_all_workers_and_many_are_not() -> None:
    assert [len(batch) for batch in drained(LengthQueue(384, 1000, True, shares=2), [10] * 8)] == [4, 2, 1, 1]
    batches = drained(LengthQueue(100, 1000, True, shares=4), [10] * 1000)
    assert [len(batch) for batch in batches][:96] == [10] * 96
    assert sum(map(len, batches)) == 1000


def test_what_is_computed_in_no_time_makes_one_batch() -> None:
    lengths = [5, 12, 20, 40, 8, 9, 10, 11]
    one, several = (drained(LengthQueue(384, 1000, True, shares=2), lengths, secs) for secs in (3e-6, 1e-4))
    assert len(one) == 1
    assert len(several) > 3, "a millisecond is worth another thread"
    sizes = [
        len(batch) * max(length for _, length in batch)
        for batch in drained(LengthQueue(384, 99, True), [9] * 200, 1e-6)
    ]
    assert max(sizes) <= 384


@settings(derandomize=True)
@given(LENGTHS, st.booleans())
def test_the_oldest_item_is_in_the_next_batch(lengths: list[int], by_length: bool) -> None:
    waiting = set(range(len(lengths)))
    for batch in drained(LengthQueue(1024, 1000, by_length), lengths):
        assert min(waiting) in {number for number, _ in batch}
        waiting -= {number for number, _ in batch}


def test_arrival_order_is_teis_rule() -> None:
    batches = drained(LengthQueue(100, 8, False), [50, 50, 50, 10])
    assert [[number for number, _ in batch] for batch in batches] == [[0, 1], [2, 3]]


@settings(derandomize=True)
@given(LENGTHS, st.integers(1, 1024))
def test_batches_of_a_gpu_may_be_filled_up_more(lengths: list[int], budget: int) -> None:
    for batch in drained(LengthQueue(budget, 1000, True, on_gpu=True), lengths):
        sizes = [length for _, length in batch]
        assert len(sizes) == 1 or len(sizes) * max(sizes) <= budget
        assert max(sizes) - min(sizes) <= max(GPU_SLACK, GPU_WASTE * max(sizes))


def test_where_there_was_no_memory_batches_have_half_as_many_tokens_and_more_again_later() -> None:
    queue, begin = LengthQueue(1024, 1000, True), time.monotonic()
    assert queue.shrink(1000, begin) == 500
    assert queue.shrink(800, begin) == 400
    assert queue.shrink(1000, begin) == 400, "it was made before the last one had failed"
    assert [len(batch) for batch in drained(queue, [100] * 10)] == [4, 4, 2]
    assert queue.shrink(1, now=3.0) == 1
    for now, budget in ((3.0 + GROW_SECS, 1), (4.0 + GROW_SECS, 2), (5.0 + GROW_SECS, 2), (5.0 + 2 * GROW_SECS, 4)):
        queue.grow(now)
        assert queue.budget == budget
    for number in range(20):
        queue.grow(1000.0 * number)
    assert queue.budget == 1024
