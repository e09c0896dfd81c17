"""Instances are woken once for all calls, again while there is no room, and no more when nobody wants them."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from appliance.core.problems import Kind, Problem
from appliance.multiplexer.waker import Waker
from testing.running import eventually


class Control:
    """As control: answers what ``outcome`` raises."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.since: dict[str, set[float]] = {}
        self.noted = 0
        self.outcome: Callable[[str], None] = lambda name: None

    def note(self) -> None:
        self.noted += 1

    def wake(self, name: str, since: float) -> None:
        self.asked[name] += 1
        self.since.setdefault(name, set()).add(since)
        self.outcome(name)


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def waker(control: Control) -> Waker:
    return Waker(control.wake, before=control.note)


def test_many_calls_ask_once(waker: Waker, control: Control) -> None:
    begun, going = threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        begun.set()
        assert going.wait(20)

    control.outcome = slowly
    for _ in range(100):
        waker.want("a")
    assert begun.wait(20)
    for _ in range(100):
        waker.want("a")
    going.set()
    eventually(lambda: not waker.at_work)
    assert (control.asked["a"], control.noted) == (1, 1)


def test_where_there_is_no_room_it_is_asked_again_as_long_as_a_call_wants_it(waker: Waker, control: Control) -> None:
    def full(name: str) -> None:
        raise Problem(Kind.UNAVAILABLE, "NO_ROOM", "none")

    control.outcome = full
    began = time.monotonic()
    waker.want("a")
    came = time.monotonic()
    eventually(lambda: control.asked["a"] >= 2)
    waker.want("a")
    eventually(lambda: not waker.at_work)  # nobody has wanted it for two seconds
    asked = control.asked["a"]
    time.sleep(0.5)
    assert control.asked["a"] == asked
    (since,) = control.since["a"]
    assert began <= since <= came, "control is told when the first call came, each time"


def test_a_refusal_for_good_is_told_to_those_who_wait(waker: Waker, control: Control) -> None:
    def never(name: str) -> None:
        raise Problem(Kind.PRECONDITION, "MODEL_CHANGED", "a file differs")

    control.outcome = never
    waker.want("a")
    eventually(lambda: not waker.at_work)
    with pytest.raises(Problem) as refused:
        waker.want("a")
    assert (refused.value.kind, refused.value.code) == (Kind.UNAVAILABLE, "MODEL_CHANGED")
    assert "a file differs" in refused.value.message
    assert control.asked["a"] == 1
    waker.want("b")
    eventually(lambda: control.asked["b"] == 1)


def test_one_that_is_gone_or_stopped_is_not_held_against_the_next_of_its_name(waker: Waker, control: Control) -> None:
    """It may be created again at once; as long as it is not there routing itself says so."""
    for code in ("INSTANCE_NOT_FOUND", "NOT_RUNNING"):

        def gone(name: str, code: str = code) -> None:
            raise Problem(Kind.PRECONDITION, code, "it is not there")

        control.outcome = gone
        waker.want("a")
        eventually(lambda: not waker.at_work)
        assert waker.want("a") is None
        eventually(lambda: not waker.at_work)


def test_who_has_waited_longest_asks_most_often_and_newcomers_come_behind(waker: Waker) -> None:
    def pauses(first: bool) -> list[float]:
        return [round(waker.pause(name, first), 1) for name in waker.at_work]

    waker.at_work = dict.fromkeys("abcdefghij", 0.0)
    assert (pauses(first=True), pauses(first=False)) == ([0.0] * 10, [0.1] * 10), "nobody waits for room"
    no_room = Problem(Kind.UNAVAILABLE, "NO_ROOM", "full")
    waker.obstacles = dict.fromkeys("abdefghi", no_room)
    assert pauses(first=False) == [0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6]
    assert waker.pause("c", first=True) == pytest.approx(0.2)


def test_a_thread_that_cannot_be_started_is_tried_again_by_the_next_call(
    waker: Waker, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            waker.want("a")
    waker.want("a")
    eventually(lambda: control.asked["a"] == 1)
