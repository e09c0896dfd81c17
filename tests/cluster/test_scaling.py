"""How many replicas an instance has, by what waits in them."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cluster.scaling import IDLE, QUEUE, QueuePolicy

POLICY = QueuePolicy(target_queue=10, replicas=1, idle_secs=60)


@pytest.mark.parametrize(
    ("target", "present", "queue", "idle", "is_called", "expected"),
    [
        (2, 2, [25, 0], [0, 0], False, 3),  # 25 wait: three replicas have 10 each at most
        (2, 2, [90, 90], [0, 0], False, 18),
        (2, 2, [4, 4], [0, 0], False, 2),  # one alone would have more than half of what it may
        (2, 2, [2, 2], [0, 0], False, 1),  # the one that stays has it done soon
        (3, 3, [4, 0, 5], [0, 0, 0], False, 2),
        (3, 3, [4, 3, 4], [0, 0, 0], False, 3),
        (2, 2, [0, 0], [3, 3], False, 1),
        (1, 1, [0], [3], False, 1),
        (1, 1, [0], [61], False, 0),
        (1, 1, [0], [61], True, 1),  # somebody asks for it just now
        (2, 2, [0, 0], [61, 3], False, 1),  # one of them was called
        (0, 0, [], [], False, 0),
        (0, 0, [], [], True, 1),
        (3, 2, [90, 90], [0, 0], False, 3),  # one is on its way
        (3, 1, [0], [61], False, 0),  # nobody calls, and the others find no machine
        (2, 2, [90], [0], False, 2),  # one has told nothing yet
    ],
)
def test_the_table(
    target: int, present: int, queue: list[float], idle: list[float], is_called: bool, expected: int
) -> None:
    assert POLICY.wanted(target, present, queue, idle, is_called) == expected


def test_one_that_never_sleeps_keeps_what_was_asked_for() -> None:
    assert QueuePolicy(10, replicas=2, idle_secs=0).wanted(2, 2, [0, 0], [9999, 9999], False) == 2


@given(st.integers(0, 20), st.lists(st.floats(0, 1000), min_size=0, max_size=20), st.booleans(), st.integers(0, 100))
def test_with_replicas_and_without_idleness_there_is_always_one(
    target: int, queue: list[float], is_called: bool, idle_secs: int
) -> None:
    policy = QueuePolicy(10, replicas=1, idle_secs=idle_secs)
    wanted = policy.wanted(target, len(queue), queue, [0.0] * len(queue), is_called)
    assert wanted >= min(target, 1) or (idle_secs == 0 and not queue)


def test_what_waits_counts_on_average_and_idleness_as_it_is() -> None:
    def series(*values: float) -> list[Any]:
        return [SimpleNamespace(timestamp=at, value=value) for at, value in enumerate(values)]

    context = SimpleNamespace(
        raw_metrics={QUEUE: {"x": series(99, 0, 6), "y": series()}, IDLE: {"x": series(0, 61)}},
        target_num_replicas=1,
        current_num_replicas=1,
        total_num_requests=0.0,
    )
    assert POLICY(context) == (0, {})
    context.raw_metrics[IDLE] = {"x": series(99, 3)}
    assert POLICY(context) == (4, {})  # 35 on average
    context.raw_metrics = None
    assert POLICY(context) == (1, {})
