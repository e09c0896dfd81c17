"""What is written to readers: frames, order, beats; and who is let go of."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.core.problems import Problem, invalid
from appliance.drivers import eventstream
from appliance.drivers.eventstream import BEAT_SECS, LONGEST_UNREAD_SECS, MOST_UNSENT, EventStreams, Reader
from testing.running import eventually


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A reader's connection: our end, and its own."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    with ours, its:
        yield ours, its


def test_an_event_is_lines_and_an_empty_one() -> None:
    text = eventstream.event({"message": "one\ntwo"}, "tick", 7)
    assert text == 'id: 7\nevent: tick\ndata: {"message": "one\\ntwo"}\n\n', "no text can end an event"
    assert json.loads(eventstream.event(["é\u2028"]).removeprefix("data: ")) == ["é\u2028"]


@pytest.mark.parametrize(("chunked", "sent"), [(True, b"5\r\nabc\n\n\r\n"), (False, b"abc\n\n")])
def test_what_the_source_has_is_sent_in_frames(
    ends: tuple[socket.socket, socket.socket], chunked: bool, sent: bytes
) -> None:
    reader = Reader(ends[0], chunked, iter(["abc\n\n", ""]).__next__)
    for _ in range(2):
        reader.fill(time.monotonic())
        assert reader.send(time.monotonic())
    assert ends[1].recv(4096) == sent


def test_one_that_has_nothing_to_say_beats(ends: tuple[socket.socket, socket.socket]) -> None:
    reader = Reader(ends[0], False, lambda: "")
    now = time.monotonic()
    for moment in (now, now + BEAT_SECS + 1, now + BEAT_SECS + 2):
        reader.fill(moment)
    assert reader.unsent == b":\n\n"


def test_one_that_does_not_read_is_let_go_of(ends: tuple[socket.socket, socket.socket]) -> None:
    text = "x" * 65536
    reader = Reader(ends[0], True, lambda: text)
    now = time.monotonic()
    filled = 0
    reader.fill(now)
    while reader.send(now):
        filled += len(text)
        assert filled <= 3 * MOST_UNSENT
        reader.fill(now)
    slow = Reader(ends[0], True, lambda: "abc")
    slow.fill(now)
    assert slow.send(now), "it is behind, and has time"
    assert not slow.send(slow.sent_at + LONGEST_UNREAD_SECS + 1)


def begun(streams: EventStreams, client: socket.socket, source: eventstream.Source) -> None:
    body = streams.body({"gunicorn.socket": client, "SERVER_PROTOCOL": "HTTP/1.1"}, source)
    assert next(body).startswith(b"retry: ")
    with pytest.raises(BrokenPipeError):
        next(body)


def test_a_connection_is_kept_until_its_reader_or_its_source_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    streams = EventStreams()
    begun(streams, ends[0], lambda: "")
    assert ends[0] in streams
    ends[1].close()
    eventually(lambda: ends[0] not in streams)

    def source() -> str:
        raise invalid("no more")

    ours, its = socket.socketpair()
    with ours, its:
        begun(streams, ours, source)
        eventually(lambda: ours not in streams)
        assert its.recv(10) + its.recv(10) == b"0\r\n\r\n", "it is closed, and not broken off"


def test_a_source_that_fails_ends_its_own_stream_only(ends: tuple[socket.socket, socket.socket]) -> None:
    streams = EventStreams()
    ours, its = socket.socketpair()
    with ours, its:
        begun(streams, ours, Path("/nowhere").read_text)
        begun(streams, ends[0], lambda: "data: 1\n\n")
        eventually(lambda: ours not in streams)
        assert ends[1].recv(100)
        assert ends[0] in streams


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, socket.socket]) -> None:
    monkeypatch.setattr(eventstream, "MOST_READERS", 1)
    streams = EventStreams()
    begun(streams, ends[0], lambda: "")
    with pytest.raises(Problem, match="1 streams of events are read already"):
        streams.body({}, lambda: "")
