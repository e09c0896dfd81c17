"""Calls in one thread: each goes on when its own reply is there or its time is over, whatever the others do."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from appliance.multiplexer.cooperation import Scheduler

LONG_SECS = 20.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for pair in made:
        for each in pair:
            each.close()


class Calls:
    """What three calls do, in the order in which they do it."""

    def __init__(self, pairs: list[Pair], secs: float = LONG_SECS) -> None:
        self.scheduler, self.pairs, self.secs = Scheduler(), pairs, secs
        self.done: list[tuple[str, int]] = []
        self.after: Callable[[int], None] = lambda number: None

    def call(self, number: int) -> None:
        self.done.append(("sent", number))
        self.scheduler.wait(self.pairs[number][0], select.POLLIN, self.secs)
        self.done.append(("ready", number))
        self.after(number)

    def run(self) -> None:
        self.scheduler.run([partial(self.call, number) for number in range(len(self.pairs))])


def test_all_are_sent_before_one_is_waited_for_and_each_goes_on_with_its_own_reply(pairs: list[Pair]) -> None:
    calls = Calls(pairs)

    def answer(number: int) -> None:
        if number:
            pairs[number - 1][1].send(b"reply")

    calls.after = answer
    pairs[2][1].send(b"reply")
    calls.run()
    assert calls.done == [("sent", 0), ("sent", 1), ("sent", 2), ("ready", 2), ("ready", 1), ("ready", 0)]


def test_replies_that_are_there_together_are_taken_in_the_order_of_the_calls(pairs: list[Pair]) -> None:
    for _, peer in pairs:
        peer.send(b"reply")
    calls = Calls(pairs)
    calls.run()
    assert calls.done[3:] == [("ready", 0), ("ready", 1), ("ready", 2)]


def test_one_whose_time_is_over_goes_on_and_the_others_wait(pairs: list[Pair]) -> None:
    scheduler, done = Scheduler(), list[str]()

    def short() -> None:
        scheduler.wait(pairs[0][0], select.POLLIN, 0.05)
        done.append("short")
        pairs[1][1].send(b"reply")

    def long() -> None:
        scheduler.wait(pairs[1][0], select.POLLIN, LONG_SECS)
        done.append("long")

    scheduler.run([long, short])
    assert done == ["short", "long"]


def test_one_that_is_given_up_from_another_thread_goes_on_at_once(pairs: list[Pair]) -> None:
    for own, _ in pairs:
        threading.Timer(0.05, partial(own.shutdown, socket.SHUT_RDWR)).start()
    calls, began = Calls(pairs), time.monotonic()
    calls.run()
    assert [each for each in calls.done if each[0] == "ready"]
    assert time.monotonic() - began < LONG_SECS / 2


def test_one_waits_again_and_again_until_its_reply_is_whole(pairs: list[Pair]) -> None:
    scheduler, received = Scheduler(), bytearray()

    def reader() -> None:
        while len(received) < 30:
            scheduler.wait(pairs[0][0], select.POLLIN, LONG_SECS)
            received.extend(pairs[0][0].recv(10))

    def writer() -> None:
        for _ in range(3):
            pairs[0][1].send(b"0123456789")
            scheduler.wait(pairs[1][0], select.POLLIN | select.POLLOUT, LONG_SECS)  # it is writable at once

    scheduler.run([reader, writer])
    assert received == b"0123456789" * 3


def test_what_one_raises_ends_the_others_and_is_raised(pairs: list[Pair]) -> None:
    scheduler, ended = Scheduler(), list[str]()

    def waits() -> None:
        try:
            scheduler.wait(pairs[0][0], select.POLLIN, LONG_SECS)
        finally:
            ended.append("waits")

    def fails() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        scheduler.run([waits, fails])
    assert ended == ["waits"]
