"""One computation for all who ask for the same at once; nobody's leaving or failing is another one's harm."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from appliance.core.problems import Kind, Problem
from appliance.multiplexer.cooperation import Scheduler, WouldBlock
from appliance.multiplexer.joined_call import CallEnded, JoinedCall, PartOfCall, may_block, scheduler_of
from appliance.multiplexer.single_flight import SingleFlight
from testing.running import eventually


class Caller:
    """What is used of a grpc.ServicerContext."""

    def __init__(self, seconds: float | None = None) -> None:
        self.until = None if seconds is None else time.monotonic() + seconds
        self.callbacks: list[Callable[[], Any]] = []
        self.active = True

    def time_remaining(self) -> float | None:
        return None if self.until is None else self.until - time.monotonic()

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        if self.active:
            self.callbacks.append(callback)
        return self.active

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def leave(self) -> None:
        self.active = False
        for callback in self.callbacks:
            callback()


class Work:
    """A computation that ends when it is told to, or when all its callers have left."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = threading.Event()
        self.result: Any = "done"

    def __call__(self, caller: Any) -> Any:
        self.count += 1
        left = threading.Event()
        if not caller.add_callback(left.set):
            left.set()
        while not (left.is_set() or self.may_end.wait(0.005)):
            pass
        if left.is_set():
            raise CallEnded(grpc.StatusCode.CANCELLED, "all have left", ())
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Callers:
    """Threads that ask for one key."""

    def __init__(self, flights: SingleFlight[Any], work: Work) -> None:
        self.flights, self.work = flights, work
        self.joined = 0
        self.pool = ThreadPoolExecutor(80)

    def join(self) -> None:
        self.joined += 1

    def ask(self, caller: Caller) -> Any:
        compute = self.flights.compute
        return self.pool.submit(compute, b"key", caller, self.work, lambda: None, self.join)


@pytest.fixture
def callers() -> Callers:
    return Callers(SingleFlight(), Work())


def begun(callers: Callers, count: int = 1) -> None:
    eventually(lambda: callers.work.count == count, every=0.005)


def test_64_callers_cost_one_computation(callers: Callers) -> None:
    answers = [callers.ask(Caller()) for _ in range(64)]
    eventually(lambda: callers.joined == 63, every=0.005)
    callers.work.may_end.set()
    assert [answer.result(30) for answer in answers] == ["done"] * 64
    assert callers.work.count == 1
    assert callers.flights.flights == {}


def test_it_goes_on_when_the_first_caller_leaves_and_another_waits(callers: Callers) -> None:
    first, second = Caller(), Caller()
    callers.ask(first)
    begun(callers)
    answer = callers.ask(second)
    eventually(lambda: callers.joined == 1, every=0.005)
    first.leave()
    time.sleep(0.05)
    callers.work.may_end.set()
    assert answer.result(30) == "done"
    assert callers.work.count == 1


def test_it_ends_when_all_have_left(callers: Callers) -> None:
    first, second = Caller(), Caller()
    ended = callers.ask(first)
    begun(callers)
    callers.ask(second)
    eventually(lambda: callers.joined == 1, every=0.005)
    first.leave()
    second.leave()
    with pytest.raises(CallEnded):
        ended.result(30)


def test_who_comes_when_all_have_left_begins_anew(callers: Callers) -> None:
    first = Caller()
    ended = callers.ask(first)
    begun(callers)
    first.leave()
    answer = callers.ask(Caller())
    begun(callers, 2)
    callers.work.may_end.set()
    assert answer.result(30) == "done"
    with pytest.raises(CallEnded):
        ended.result(30)


@pytest.mark.parametrize(
    "failure",
    [
        Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", "nobody there", 7),
        CallEnded(grpc.StatusCode.INVALID_ARGUMENT, "too long", (("k", "v"),)),
    ],
    ids=["refusal", "status"],
)
def test_an_error_is_given_to_all_and_kept_for_nobody(callers: Callers, failure: Exception) -> None:
    callers.work.result = failure
    answers = [callers.ask(Caller()) for _ in range(8)]
    eventually(lambda: callers.joined == 7, every=0.005)
    callers.work.may_end.set()
    errors = [answer.exception(30) for answer in answers]
    assert {(type(error), str(error)) for error in errors} == {(type(failure), str(failure))}
    assert len({id(error) for error in errors}) == 8
    callers.work.result = "well"
    assert callers.ask(Caller()).result(30) == "well"


def test_a_bug_is_told_to_all_and_leaves_nothing_behind(callers: Callers) -> None:
    callers.work.result = KeyError("a bug")
    first, second = callers.ask(Caller()), callers.ask(Caller())
    eventually(lambda: callers.joined == 1, every=0.005)
    callers.work.may_end.set()
    kinds = {type(first.exception(30)), type(second.exception(30))}
    assert kinds == {KeyError, Problem}
    assert callers.flights.flights == {}


def test_who_has_time_left_asks_anew_when_the_first_ones_was_over(callers: Callers) -> None:
    callers.work.result = CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, "late", ())
    first = callers.ask(Caller(seconds=60))
    begun(callers)
    second = callers.ask(Caller(seconds=60))
    eventually(lambda: callers.joined == 1, every=0.005)
    callers.work.may_end.set()
    with pytest.raises(CallEnded):
        first.result(30)
    eventually(lambda: callers.work.count >= 2, every=0.005)
    with pytest.raises(CallEnded):  # it was the first one of the second computation, which ended for lack of time, too
        second.result(30)


def test_nobody_waits_beyond_his_deadline(callers: Callers) -> None:
    callers.ask(Caller())
    begun(callers)
    with pytest.raises(Problem, match="deadline"):
        callers.ask(Caller(seconds=0.2)).result(30)
    callers.work.may_end.set()


def test_what_was_computed_a_moment_ago_is_not_computed_again() -> None:
    work = Work()
    work.may_end.set()
    asked = SingleFlight[Any]().compute(b"key", Caller(), work, lambda: "kept", lambda: None)
    assert (asked, work.count) == ("kept", 0)


def test_callers_together_have_the_latest_deadline_or_none() -> None:
    call = JoinedCall(Caller(seconds=1))
    assert (call.time_remaining() or 0) < 1.01
    call.add(Caller(seconds=30))
    assert 10 < (call.time_remaining() or 0) < 30.01
    call.add(Caller())
    assert call.time_remaining() is None


def test_a_replica_that_does_not_answer_is_waited_for_once(callers: Callers) -> None:
    """It ended for want of an answer, and no caller's deadline is near: who asked anew would wait as long again."""

    def hung(caller: Any) -> Any:
        caller.time_remaining()
        return callers.work(caller)

    callers.work.result = CallEnded(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer from the replica", ())
    compute = callers.flights.compute
    answers = [
        callers.pool.submit(compute, b"key", Caller(seconds), hung, lambda: None, callers.join)
        for seconds in (60, 60, None, None)
    ]
    eventually(lambda: callers.joined == 3, every=0.005)
    callers.work.may_end.set()
    assert {type(answer.exception(30)) for answer in answers} == {CallEnded}
    assert callers.work.count == 1


def test_who_leaves_waits_no_longer_for_the_work_of_another(callers: Callers) -> None:
    callers.ask(Caller())
    begun(callers)
    second = Caller()
    answer = callers.ask(second)
    eventually(lambda: len(second.callbacks) == 2, every=0.005)
    second.leave()
    with pytest.raises(Problem):
        answer.result(30)
    callers.work.may_end.set()


def test_a_computation_that_its_thread_may_not_wait_for_is_done_by_one_who_joined_it() -> None:
    flights = SingleFlight[str]()
    began, joined = threading.Event(), threading.Event()

    def would_block(caller: Any) -> str:
        began.set()
        assert joined.wait(10)
        may_block(caller)
        raise AssertionError

    with ThreadPoolExecutor() as threads:
        part: Any = PartOfCall(Caller(), Scheduler())
        part.add_callback = part.context.add_callback
        first = threads.submit(flights.compute, b"key", part, would_block, lambda: None, lambda: None)
        assert began.wait(10)
        other: Any = Caller()
        second = threads.submit(flights.compute, b"key", other, lambda caller: "computed", lambda: None, joined.set)
        assert second.result(10) == "computed"
        with pytest.raises(WouldBlock):
            first.result(10)


def test_who_may_not_wait_does_not_join() -> None:
    flights = SingleFlight[str]()
    work = Work()
    with ThreadPoolExecutor() as threads:
        caller: Any = Caller()
        first = threads.submit(flights.compute, b"key", caller, work, lambda: None, lambda: None)
        eventually(lambda: work.count == 1)
        part: Any = PartOfCall(Caller(), Scheduler())
        part.add_callback = part.context.add_callback
        assert scheduler_of(JoinedCall(part)) is part.scheduler
        with pytest.raises(WouldBlock):
            flights.compute(b"key", part, work, lambda: None, lambda: pytest.fail("it waits"))
        work.may_end.set()
        assert first.result(10) == "done"
