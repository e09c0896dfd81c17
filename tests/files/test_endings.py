"""Connections that their clients shall end, over real sockets and without a server."""

import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from appliance.files import endings
from appliance.files.endings import UNREAD_BYTES, EndingConnections


class Ended:
    """Both ends of a connection that has had its last answer."""

    def __init__(self) -> None:
        self.poller = selectors.DefaultSelector()
        self.endings = EndingConnections(self.poller)
        self.client, self.served = socket.socketpair()
        self.client.settimeout(5)
        self.times = 0
        self.add()

    def add(self) -> None:
        self.endings.add(self.served, self.count)

    def count(self) -> None:
        self.times += 1

    def poll(self) -> None:
        for key, _ in self.poller.select(0):
            key.data(key.fileobj)

    def is_closed(self) -> bool:
        """Whether it is closed, forgotten, and was told of once."""
        assert self.times == (self.served.fileno() < 0)
        assert len(self.endings.endings) == len(self.poller.get_map()) == 1 - self.times
        return self.times == 1


@pytest.fixture
def ended() -> Iterator[Ended]:
    each = Ended()
    yield each
    each.client.close()
    each.served.close()
    each.poller.close()


def test_the_client_sees_the_end_and_ends_it_too(ended: Ended) -> None:
    assert ended.client.recv(1) == b""
    ended.poll()
    assert not ended.is_closed()
    ended.client.close()
    ended.poll()
    assert ended.is_closed()


def test_what_nobody_reads_is_taken_away_up_to_a_limit(ended: Ended) -> None:
    sent = 0
    while not ended.is_closed():
        sent += ended.client.send(bytes(4096))
        ended.poll()
    assert sent == UNREAD_BYTES


def test_one_that_the_client_does_not_end_is_closed_after_a_while(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended.endings.expire()
    assert not ended.is_closed()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + endings.LINGER_SECS)
    ended.endings.expire()
    assert ended.is_closed()
    ended.endings.expire()


def test_one_that_is_closed_already_is_told_of_at_once(ended: Ended) -> None:
    ended.client.close()
    ended.poll()
    assert ended.is_closed()
    ended.add()
    assert ended.times == 2
