"""The two lanes of an instance: their bounds hold in any order of events, and both keep moving."""

import heapq
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.core.admission import Lanes, Verdict


class AnyOrder(RuleBasedStateMachine):
    """An owner of lanes as `AdmissionQueue` is one: what it admits, it counts."""

    @initialize(
        capacity=st.integers(0, 300), max_size=st.integers(0, 20), share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])
    )
    def begin(self, capacity: int, max_size: int, share: float) -> None:
        self.lanes = Lanes(capacity, max_size, share)
        self.capacity, self.max_size, self.share = capacity, max_size, share
        self.slices: list[int] = []
        self.now = 1000.0

    @rule()
    def a_single_comes(self) -> None:
        before = self.lanes.interactive + self.lanes.bulk
        verdict = self.lanes.verdict_on_single()
        if verdict is Verdict.ADMIT:
            assert before < self.capacity
            assert self.lanes.waiting == 0, "no text overtakes the queue"
            self.lanes.interactive += 1
        elif verdict is Verdict.WAIT:
            assert self.lanes.waiting < self.max_size
            self.lanes.waiting += 1
        else:
            assert self.lanes.waiting == self.max_size
            assert 10 <= self.lanes.retry_after_ms() <= 60_000

    @rule(texts=st.integers(1, 64))
    def singles_come_together(self, texts: int) -> None:
        before = self.lanes.interactive + self.lanes.bulk
        if self.lanes.admits_singles(texts):
            assert before + texts <= self.capacity
            assert self.lanes.waiting == 0, "they overtake nobody"
            self.lanes.interactive += texts
        else:
            assert self.lanes.waiting or before + texts > self.capacity

    @rule(cost=st.integers(1, 128))
    def a_slice_comes(self, cost: int) -> None:
        admitted = self.lanes.admits_bulk(cost)
        assert admitted or self.slices, "bulk always moves"
        if admitted and self.slices:
            after = sum(self.slices) + cost
            assert after <= self.capacity * (1 - self.share) + 1e-9, "batches leave the reserve free"
            assert after + self.lanes.interactive + self.lanes.waiting <= self.capacity
        if admitted:
            self.lanes.bulk += cost
            self.slices.append(cost)

    @precondition(lambda self: self.lanes.interactive)
    @rule(gap=st.floats(0, 3))
    def a_single_ends(self, gap: float) -> None:
        self.lanes.interactive -= 1
        self.ended(1, gap)

    @precondition(lambda self: self.slices)
    @rule(gap=st.floats(0, 3))
    def a_slice_ends(self, gap: float) -> None:
        cost = self.slices.pop(0)
        self.lanes.bulk -= cost
        self.ended(cost, gap)

    def ended(self, texts: int, gap: float) -> None:
        self.now += gap
        self.lanes.count_answers(texts, self.now)
        while self.lanes.waiting and self.lanes.admits_single:
            self.lanes.waiting -= 1
            self.lanes.interactive += 1

    @rule(capacity=st.integers(0, 300))
    def replicas_come_or_go(self, capacity: int) -> None:
        self.lanes.capacity = self.capacity = capacity
        self.ended(0, 0.0)

    @invariant()
    def the_queue_is_bounded_and_the_rate_is_sane(self) -> None:
        if hasattr(self, "lanes"):
            assert 0 <= self.lanes.waiting <= self.max_size
            assert self.lanes.rate >= 0
            assert 10 <= self.lanes.retry_after_ms() <= 60_000


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(st.integers(1, 1000), st.sampled_from([0.1, 0.25, 0.9]))
def test_beside_a_running_slice_single_texts_have_the_reserve_at_once(capacity: int, share: float) -> None:
    lanes = Lanes(capacity, 10, share)
    while lanes.admits_bulk(1) and lanes.bulk < capacity:
        lanes.bulk += 1
    if capacity > 1:
        assert lanes.verdict_on_single() is Verdict.ADMIT


def test_the_retry_time_follows_the_rate_of_answers() -> None:
    lanes = Lanes(100, 1000, 0.25, waiting=1000, rated_at=1000.0)
    for second in range(1, 101):
        lanes.count_answers(100, 1000.0 + second)
    assert 9000 <= lanes.retry_after_ms() <= 12000  # the whole queue, at 100 texts a second
    for second in range(1, 101):
        lanes.count_answers(1000, 1100.0 + second)
    assert 900 <= lanes.retry_after_ms() <= 1200


def test_time_without_work_does_not_count() -> None:
    lanes = Lanes(4, 4, 0.0)
    for hour in range(3):
        lanes.begin_work(3600.0 * hour)
        for text in range(1, 11):
            lanes.count_answers(1, 3600.0 * hour + text / 10)
    assert abs(lanes.rate - 10) < 0.5


def test_what_was_measured_while_calls_waited_counts_more() -> None:
    """One caller after the other is no measure of what many get."""
    lanes = Lanes(64, 64, 0.0)
    for text in range(1, 101):
        lanes.count_answers(1, text / 10)
    assert abs(lanes.rate - 10) < 1
    lanes.waiting = 5
    for text in range(1, 101):
        lanes.count_answers(1, 10 + text / 200)
    assert abs(lanes.rate - 200) < 10
    lanes.waiting = 0
    for text in range(1, 101):
        lanes.count_answers(1, 20 + text / 10)
    assert abs(lanes.rate - 200) < 10


@pytest.mark.parametrize("service_secs", [1.0, 0.001])
@pytest.mark.parametrize("burst", [40, 400])
def test_callers_that_come_back_when_told_find_permits_that_were_not_free_for_long(
    service_secs: float, burst: int
) -> None:
    """A burst of callers with one text each, ten permits, a queue of twenty; a caller that is told t waits t. All are
    answered in twice the time that a queue without an end would take."""
    lanes, permits, comes = Lanes(10, 20, 0.0), 10, [(0.0, number) for number in range(burst)]
    running: list[float] = []
    waiting = refusals = tries = 0
    now = 0.0
    lanes.begin_work(0.0)
    for number in range(permits):  # the time that a text takes is measured
        lanes.count_answers(1, service_secs * (number + 1) / permits)
    lanes.begin_work(0.0)
    while comes or running:
        now = min([at for at, _ in comes[:1]] + running[:1])
        while running and running[0] <= now:
            heapq.heappop(running)
            lanes.interactive -= 1
            lanes.count_answers(1, now)
            if waiting:
                waiting -= 1
                lanes.waiting, lanes.interactive = waiting, lanes.interactive + 1
                heapq.heappush(running, now + service_secs)
        while comes and comes[0][0] <= now:
            _, caller = heapq.heappop(comes)
            tries += 1
            verdict = lanes.verdict_on_single()
            if verdict is Verdict.REFUSE:
                refusals += 1
                heapq.heappush(comes, (now + max(lanes.count_refusal(now) / 1000, 1e-6), caller))
            elif verdict is Verdict.WAIT:
                waiting += 1
                lanes.waiting = waiting
            else:
                lanes.interactive += 1
                heapq.heappush(running, now + service_secs)
    best = burst * service_secs / permits
    assert now <= 2 * best + service_secs + 0.05, f"{now} s, {best} s at best"  # no caller is told less than 10 ms
    assert tries <= 3 * burst
    assert refusals


def test_the_rate_does_not_depend_on_how_answers_are_lumped() -> None:
    lumped, even = Lanes(1, 1, 0.0, rated_at=1000.0), Lanes(1, 1, 0.0, rated_at=1000.0)
    for step in range(1, 4001):
        even.count_answers(1, 1000.0 + step / 100)
        if step % 50 == 0:
            lumped.count_answers(50, 1000.0 + step / 100)
    assert abs(even.rate - 100) < 10
    assert abs(lumped.rate - 100) < 10


def test_callers_that_come_back_when_told_are_counted_right_and_most_get_a_permit() -> None:
    """Three times as many callers as there are permits; each comes back at once, or when it was told to."""
    lanes, callers, rate = Lanes(64, 64, 0.25), 384, 200.0
    comes = [(number / 10_000, number) for number in range(callers)]
    served, queue, refused = Counter[int](), deque[int](), 0
    for step in range(60 * int(rate)):
        now = step / rate
        while comes[0][0] <= now:
            _, caller = heapq.heappop(comes)
            if lanes.verdict_on_single() is Verdict.REFUSE:
                refused += 1
                heapq.heappush(comes, (now + lanes.count_refusal(now) / 1000, caller))
                continue
            queue.append(caller)
            lanes.interactive, lanes.waiting = min(64, len(queue)), max(0, len(queue) - 64)
        served[caller := queue.popleft()] += 1
        lanes.interactive, lanes.waiting = min(64, len(queue)), max(0, len(queue) - 64)
        lanes.count_answers(1, now)
        heapq.heappush(comes, (now + 0.002, caller))
    away = sum(at > now + 0.01 for at, _ in comes)
    assert abs(lanes.sent_away - away) < 0.1 * callers
    assert len(served) > 0.9 * callers
    assert refused < 0.28 * (refused + served.total())
