"""The journal: `seq` rises by one over all writers, the ring is bounded, and a cut line is no event."""

import json
from collections import deque
from pathlib import Path

import pytest

from appliance.drivers.journal import LONGEST_LINE, RING_BYTES, Journal
from testing.children import now, run_together


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "events.jsonl", now)


def fill(journal: Journal, *messages: str) -> None:
    for message in messages:
        journal.record("tested", "a", message)


def numbers(journal: Journal, since: int = 0) -> list[int]:
    return [entry["seq"] for entry in journal.since(since)]


def test_no_events_are_no_events(journal: Journal) -> None:
    assert journal.since(0) == []


def test_an_event_says_what_where_and_when(journal: Journal) -> None:
    journal.record("created", "minilm", 'Ünï "quoted"\nnew line', attempt=2)
    journal.record("up", None, "all")
    first, second = journal.since(0)
    assert first == {
        "seq": 1,
        "time": now(),
        "event": "created",
        "instance": "minilm",
        "message": 'Ünï "quoted"\nnew line',
        "attempt": 2,
    }
    assert (second["seq"], second["instance"]) == (2, None)


@pytest.mark.parametrize("since", [0, 1, 4, 5, 9])
def test_since_gives_what_came_after(journal: Journal, since: int) -> None:
    fill(journal, *"abcde")
    assert numbers(journal, since) == [seq for seq in (1, 2, 3, 4, 5) if seq > since]


def test_events_are_read_where_no_lock_can_be_had(journal: Journal) -> None:
    """On a disk that nobody may write, `GET /events` ended with an error of ours."""
    fill(journal, *"abc")
    lock = journal.path.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert numbers(journal) == [1, 2, 3]


def test_numbers_go_on_after_a_restart(journal: Journal) -> None:
    fill(journal, "a", "b")
    fill(Journal(journal.path, now), "c")
    assert numbers(journal) == [1, 2, 3]


@pytest.mark.processes
def test_numbers_rise_by_one_over_several_processes(journal: Journal) -> None:
    run_together(*(("record_events", journal.path, who, 40) for who in "abcd"))
    events = journal.since(0)
    assert [entry["seq"] for entry in events] == list(range(1, 161))
    for who in "abcd":
        assert [entry["message"] for entry in events if entry["instance"] == who] == [str(n) for n in range(40)]


def test_the_ring_is_bounded_and_its_newest_events_have_no_gap(journal: Journal) -> None:
    fill(journal, *("x" * 50_000 for _ in range(130)))
    sequence = numbers(journal)
    assert sequence[-1] == 130
    assert sequence == list(range(sequence[0], 131))
    assert len(sequence) * 50_000 >= RING_BYTES * 0.9
    assert sum(path.stat().st_size for path in journal.path.parent.iterdir()) <= 2 * RING_BYTES


@pytest.mark.parametrize("length", [60_000, 65_536, 200_000])
def test_numbers_go_on_after_a_long_event(journal: Journal, length: int) -> None:
    """A message with log lines can be long; the next event must still find the number before it."""
    fill(journal, "a", "b", "x" * length, "c")
    assert numbers(journal) == [1, 2, 3, 4]


def test_an_event_with_the_whole_end_of_a_log_is_one_line_of_bounded_length(journal: Journal) -> None:
    fill(journal, "a", "b")
    lines = ["first", *("\U0001f4a5" * 65_536 for _ in range(10)), "last"]
    journal.record("died", "a", "\0" * 70_000, last_lines=lines, reason="x" * 70_000, replica=3)
    fill(journal, "c")
    assert numbers(journal) == [1, 2, 3, 4]
    event = journal.since(2)[0]
    assert (event["event"], event["instance"], event["replica"]) == ("died", "a", 3)
    assert event["last_lines"][-1] == "last"
    assert max(map(len, journal.path.read_bytes().splitlines())) <= LONGEST_LINE


@pytest.mark.parametrize("length", [65_535, 65_536, 131_072, 1_000_000])
@pytest.mark.parametrize("before", ["", '{"seq": 6, "message": "b"}\n'])
@pytest.mark.parametrize("after", ["", '{"seq": 8, "ti'])
def test_numbers_go_on_after_a_line_of_any_length(journal: Journal, length: int, before: str, after: str) -> None:
    """As an earlier release may have left it, which cut nothing."""
    line = json.dumps({"seq": 7, "message": "\\n" * length})
    journal.path.write_text(f"{before}{line}\n{after}")
    fill(journal, "c")
    assert journal.since(7)[0]["seq"] == 8


CUT = [b'{"seq": 4, "ti', b"\0\0\0\0", b'{"seq": 4}x\n', b"\xff\xfe\n", b"[]\n", b'{"seq": "4"}\n', b"\n\n", b"4\n"]


@pytest.mark.parametrize("cut", CUT, ids=repr)
def test_what_a_crash_cut_off_is_no_event(journal: Journal, cut: bytes) -> None:
    fill(journal, "a", "b", "c")
    with journal.path.open("ab") as file:
        file.write(cut)
    assert numbers(journal) == [1, 2, 3]


@pytest.mark.parametrize("cut", CUT, ids=repr)
def test_the_event_after_a_cut_line_is_not_lost_with_it(journal: Journal, cut: bytes) -> None:
    fill(journal, "a", "b", "c")
    with journal.path.open("ab") as file:
        file.write(cut)
    fill(journal, "d", "e")
    assert [(entry["seq"], entry["message"]) for entry in journal.since(3)] == [(4, "d"), (5, "e")]


def test_each_line_is_one_json_object(journal: Journal) -> None:
    fill(journal, "a\nb", "\u2028", "c\r")
    lines = journal.path.read_bytes().split(b"\n")
    assert [json.loads(line)["message"] for line in lines[:-1]] == ["a\nb", "\u2028", "c\r"]


def test_a_journal_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("I am no folder")
    outside: Journal[str] = Journal(tmp_path / "folder" / "events.jsonl", now)
    outside.record("tested", None, "lost")
    (tmp_path / "events.jsonl").mkdir()
    inside: Journal[str] = Journal(tmp_path / "events.jsonl", now)
    inside.record("tested", None, "lost")


def test_what_comes_while_the_oldest_is_written_pushes_nothing_else_out(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one behind it was lost with it."""
    written: list[str] = []
    journal.unwritten = deque((({"message": str(number)}) for number in range(3)), maxlen=3)

    def append(entry: dict[str, str]) -> None:
        if not written:
            journal.unwritten.append({"message": "meanwhile"})
        written.append(entry["message"])

    monkeypatch.setattr(journal, "append", append)
    journal.write()
    assert written == ["0", "1", "2", "meanwhile"]
