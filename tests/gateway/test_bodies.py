"""The few permits of large requests: who has one, for how long, and how many may wait for one."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from appliance.drivers.memory import Reserve
from appliance.gateway import bodies
from appliance.gateway.bodies import LARGE_REQUESTS, LARGE_WAITING, RequestMemory
from appliance.gateway.refusals import Refusal
from appliance.gateway.responses import StreamedAnswer
from testing.running import eventually


def large() -> RequestMemory:
    memory = RequestMemory(Reserve(2**30))
    memory.acquire_large_permit()
    return memory


@contextmanager
def all_in_work() -> Iterator[list[RequestMemory]]:
    with ExitStack() as ends:
        held = [large() for _ in range(LARGE_REQUESTS)]
        for each in held:
            ends.callback(each.release)
        yield held


def test_who_reads_slowly_keeps_no_other_large_request_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readers of long answers kept all others out for as long as they read."""
    monkeypatch.setattr(bodies, "LARGE_WAIT_SECS", 0.05)
    with all_in_work() as (first, *_):
        with pytest.raises(Refusal, match="large requests are in work"):
            large()
        first.reserve(1000)
        answer = StreamedAnswer(iter([b"[", b"]"]), first)
        pieces = iter(answer)
        large().release()
        assert first.reservation.size == 1000, "what it keeps is booked until it is sent"
        assert b"".join(pieces) == b"[]"
        answer.close()
        assert first.reservation.size == 0


def test_few_wait_for_a_permit_and_the_others_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread, and who sends little to another instance waited for one."""
    monkeypatch.setattr(bodies, "LARGE_WAIT_SECS", 20)
    permits = threading.BoundedSemaphore(LARGE_WAITING)
    monkeypatch.setattr(bodies, "may_wait", permits)
    ended: list[str] = []

    def ask() -> None:
        large().release()
        ended.append("had one")

    with all_in_work():
        waiting = [threading.Thread(target=ask) for _ in range(LARGE_WAITING)]
        for each in waiting:
            each.start()
        eventually(lambda: permits._value == 0)
        with pytest.raises(Refusal, match="try again") as told:
            large()
        assert told.value.retry_after_ms == 5000
        assert ended == []
    for each in waiting:
        each.join()
    assert ended == ["had one"] * LARGE_WAITING
