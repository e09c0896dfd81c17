"""What is written to readers: frames, order, beats; and who is let go of."""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.core.problems import Problem, invalid
from appliance.drivers import eventstream
from appliance.drivers.eventstream import BEAT_SECS, LONGEST_UNREAD_SECS, MOST_READERS, EventStreams, Reader
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
    reader = Reader(ends[0], chunked, iter(["abc\n\n", *[""] * 9]).__next__)
    assert all(reader.serve(time.monotonic()) for _ in range(2))
    assert ends[1].recv(4096) == sent


def test_one_that_has_nothing_to_say_beats(ends: tuple[socket.socket, socket.socket]) -> None:
    reader = Reader(ends[0], False, lambda: "")
    now = time.monotonic()
    assert all(reader.serve(moment) for moment in (now, now + BEAT_SECS + 1, now + BEAT_SECS + 2))
    assert ends[1].recv(4096) == b":\n\n"


def test_a_long_story_reaches_whoever_reads(ends: tuple[socket.socket, socket.socket]) -> None:
    story = iter([*["x" * 65536] * 64, *[""] * 1000])
    reader = Reader(ends[0], False, story.__next__)
    heard, now = 0, time.monotonic()
    while heard < 64 * 65536:
        assert reader.serve(now)
        assert len(reader.unsent) <= 65536, "no more waits for him than his source says at once"
        heard += len(ends[1].recv(1 << 20))


def test_one_that_does_not_read_is_let_go_of_and_asked_for_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    asked: list[int] = []

    def source() -> str:
        asked.append(1)
        return "x" * 65536

    reader, now = Reader(ends[0], True, source), time.monotonic()
    for _ in range(100):
        assert reader.serve(now), "it is behind, and has time"
    calls = len(asked)
    assert reader.serve(now + LONGEST_UNREAD_SECS - 1)
    assert not reader.serve(reader.sent_at + LONGEST_UNREAD_SECS + 1)
    assert len(asked) == calls < 50
    assert len(reader.unsent) <= 65536 + 16


def begun(streams: EventStreams, client: socket.socket, source: eventstream.Source) -> None:
    body = streams.body({"gunicorn.socket": client, "SERVER_PROTOCOL": "HTTP/1.1"}, source)
    assert next(body).startswith(b"retry: ")
    with pytest.raises(BrokenPipeError):
        next(body)


def is_kept(streams: EventStreams, client: socket.socket) -> bool:
    return id(client) in streams.kept


def test_who_asks_of_a_connection_that_has_ended_is_told_that_it_was_taken(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """gunicorn may be a moment late, and would count it twice."""
    streams = EventStreams()
    assert not streams.has_taken(ends[0])
    begun(streams, ends[0], lambda: "")
    ends[1].close()
    eventually(lambda: not is_kept(streams, ends[0]))
    assert streams.has_taken(ends[0])
    assert not streams.has_taken(ends[0]), "another one may have its place in memory"


def test_whoever_was_told_that_he_reads_has_his_place_before_gunicorn_gives_his_connection_away(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """One who was answered, and then cut off because others had come, would not know why."""
    streams = EventStreams()
    environ = {"gunicorn.socket": ends[0], "SERVER_PROTOCOL": "HTTP/1.1"}
    bodies = [streams.body(environ, lambda: "") for _ in range(MOST_READERS)]
    with pytest.raises(Problem, match="streams of events are read already"):
        streams.body(environ, lambda: "")
    bodies.pop()  # as gunicorn does with one whose head could not be written
    begun(streams, ends[0], lambda: "")
    with pytest.raises(Problem, match="streams of events are read already"):
        streams.body(environ, lambda: "")
    bodies.pop()
    streams.body(environ, lambda: "")


def test_sources_are_asked_once_in_a_tick_whatever_readers_say(ends: tuple[socket.socket, socket.socket]) -> None:
    streams, asked = EventStreams(), list[float]()
    others = [socket.socketpair() for _ in range(20)]

    def source() -> str:
        asked.append(time.monotonic())
        return ""

    begun(streams, ends[0], source)
    for ours, its in others:
        begun(streams, ours, lambda: "")
        its.send(b"x" * 10)
        time.sleep(0.02)
    eventually(lambda: not any(is_kept(streams, ours) for ours, _ in others))  # who speaks is no reader
    assert all(later - earlier > 0.4 for earlier, later in itertools.pairwise(asked))
    for ours, its in others:
        ours.close()
        its.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_ends_the_streams_and_the_next_ones_are_served(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    streams = EventStreams()
    ours, its = socket.socketpair()
    with ours, its:
        begun(streams, ours, lambda: [""][1])
        eventually(lambda: streams.thread and not streams.thread.is_alive())
        assert its.recv(10) == b"", "it is closed, and its reader comes back"
    begun(streams, ends[0], iter(["data: 1\n\n", *[""] * 1000]).__next__)
    ends[1].settimeout(10)
    assert b"data: 1" in ends[1].recv(100)


def test_a_connection_is_kept_until_its_reader_or_its_source_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    streams = EventStreams()
    begun(streams, ends[0], lambda: "")
    assert is_kept(streams, ends[0])
    ends[1].close()
    eventually(lambda: not is_kept(streams, ends[0]))

    def source() -> str:
        raise invalid("no more")

    ours, its = socket.socketpair()
    with ours, its:
        begun(streams, ours, source)
        eventually(lambda: not is_kept(streams, ours))
        assert its.recv(10) + its.recv(10) == b"0\r\n\r\n", "it is closed, and not broken off"


def test_a_source_that_fails_ends_its_own_stream_only(ends: tuple[socket.socket, socket.socket]) -> None:
    streams = EventStreams()
    ours, its = socket.socketpair()
    with ours, its:
        begun(streams, ours, Path("/nowhere").read_text)
        begun(streams, ends[0], lambda: "data: 1\n\n")
        eventually(lambda: not is_kept(streams, ours))
        assert ends[1].recv(100)
        assert is_kept(streams, ends[0])


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, socket.socket]) -> None:
    monkeypatch.setattr(eventstream, "MOST_READERS", 1)
    streams = EventStreams()
    begun(streams, ends[0], lambda: "")
    with pytest.raises(Problem, match="1 streams of events are read already"):
        streams.body({}, lambda: "")
