"""Which worker is to have the next connection."""

from appliance.core.connection_counts import SLOTS, ConnectionCounts


def no_counts() -> ConnectionCounts:
    return ConnectionCounts(memoryview(bytearray(8 * SLOTS)).cast("q"))


def test_whoever_has_fewest_is_to_have_the_next_one() -> None:
    counts = no_counts()
    first = counts.enter([])
    assert not counts.has_more(first)  # there is nobody else
    second = counts.enter([first])
    assert first != second
    counts.set(first, 3)
    assert not counts.has_more(first)  # the other one is starting
    counts.set(second, 2)
    assert counts.has_more(first)
    assert not counts.has_more(second)
    counts.set(second, 3)
    assert not counts.has_more(first)
    assert not counts.has_more(second)


def test_a_worker_that_has_ended_is_to_have_none() -> None:
    counts = no_counts()
    first, second = counts.enter([]), counts.enter([0])
    counts.set(first, 3)
    counts.set(second, 0)
    assert counts.has_more(first)
    counts.leave(second)
    assert not counts.has_more(first)
    assert counts.enter([first]) == second
    assert not counts.has_more(first)


def test_more_workers_than_are_told_apart_still_start() -> None:
    counts = no_counts()
    assert counts.enter(range(SLOTS)) in range(SLOTS)
