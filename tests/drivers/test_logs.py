"""Log files: a window is Python's own slice over all lines of all rotated parts, and a tail is its end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drivers import logs
from testing.specs import LAW

BOUNDS = st.none() | st.integers(-60, 60)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines 0 to 39 in four parts, the oldest in .3, as supervisor rotates."""
    path = tmp_path_factory.mktemp("logs") / "a-0.log"
    for part, first in ((".3", 0), (".2", 10), (".1", 20), ("", 30)):
        path.with_name(path.name + part).write_text("".join(f"line {n}\n" for n in range(first, first + 10)))
    path.with_name("a-0.log.bak").write_text("not a part\n")
    path.with_name("a-01.log").write_text("another's\n")
    return path


def slice_of(path: Path, start: int | None, end: int | None) -> list[str]:
    return list(logs.window(path, start, end).lines)


@LAW
@given(BOUNDS, BOUNDS)
def test_a_window_is_a_python_slice(rotated: Path, start: int | None, end: int | None) -> None:
    everything = [f"line {n}" for n in range(40)]
    window = logs.window(rotated, start, end)
    lines = list(window.lines)
    assert lines == everything[start:end]
    assert lines == everything[window.start : window.end]
    assert window.total == 40


@pytest.mark.parametrize("bound", [2**70, -(2**70)])
def test_a_bound_far_outside_is_a_bound(rotated: Path, bound: int) -> None:
    everything = [f"line {n}" for n in range(40)]
    assert slice_of(rotated, bound, None) == everything[bound:]
    assert slice_of(rotated, None, bound) == everything[:bound]


def test_a_log_that_was_never_written_is_empty(tmp_path: Path) -> None:
    window = logs.window(tmp_path / "a-0.log", -10, None)
    assert (list(window.lines), window.start, window.end, window.total) == ([], 0, 0, 0)
    assert logs.tail(tmp_path / "a-0.log", 10) == []


def test_rotated_parts_come_oldest_first_and_gaps_do_not_matter(tmp_path: Path) -> None:
    for part, text in ((".2", "old\n"), ("", "new\n")):
        (tmp_path / f"a-0.log{part}").write_text(text)
    assert slice_of(tmp_path / "a-0.log", None, None) == ["old", "new"]
    (tmp_path / "a-0.log").unlink()
    assert slice_of(tmp_path / "a-0.log", None, None) == ["old"]


def test_what_is_rotated_away_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "a-0.log"
    for part, text in ((".1", "old\n"), ("", "new\n")):
        (tmp_path / f"a-0.log{part}").write_text(text)
    window = logs.window(log, None, None)
    log.replace(tmp_path / "a-0.log.1")
    log.write_text("later\n")
    assert (list(window.lines), window.total) == (["old", "new"], 2)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"no end", ["no end"]),
        (b"dos\r\nunix\n", ["dos", "unix"]),
        (b"\xff\xfe broken \xc3\n", ["\ufffd\ufffd broken \ufffd"]),
        ("日本 \u2028 one line\n".encode(), ["日本 \u2028 one line"]),
    ],
    ids=repr,
)
def test_any_bytes_are_lines(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    (tmp_path / "a-0.log").write_bytes(content)
    assert slice_of(tmp_path / "a-0.log", None, None) == lines


PRINTED = st.lists(st.text("abc é日", max_size=8), max_size=12)


@LAW
@given(PRINTED, st.integers(1, 15))
def test_a_tail_is_the_end_of_the_log(tmp_path_factory: pytest.TempPathFactory, printed: list[str], count: int) -> None:
    path = tmp_path_factory.getbasetemp() / "tail.log"
    path.write_text("".join(f"{line}\n" for line in printed))
    assert logs.tail(path, count) == printed[-count:] == slice_of(path, -count, None)


@pytest.mark.parametrize("separator", ["\f", "\x0b", "\x1c", "\x85", "\u2028"], ids=ascii)
def test_a_tail_and_a_window_agree_on_what_a_line_is(tmp_path: Path, separator: str) -> None:
    (tmp_path / "a-0.log").write_text(f"first\none{separator}line\nlast\n")
    assert logs.tail(tmp_path / "a-0.log", 2) == slice_of(tmp_path / "a-0.log", -2, None)


def test_a_tail_of_nothing_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a-0.log").write_text("a\nb\n")
    assert logs.tail(tmp_path / "a-0.log", 0) == []


def test_a_tail_reads_only_so_much(tmp_path: Path) -> None:
    (tmp_path / "a-0.log").write_text("x" * 1_000_000 + "\nlast\n")
    newest = logs.tail(tmp_path / "a-0.log", 10, longest=1000)
    assert newest[-1] == "last"
    assert sum(map(len, newest)) <= 1000


def test_a_log_that_cannot_be_read_has_no_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hung replica was not ended, because its last lines belong into the event."""
    (tmp_path / "a.log").mkdir()
    assert logs.tail(tmp_path / "a.log", 5) == []
    assert "could not be read" in caplog.text
