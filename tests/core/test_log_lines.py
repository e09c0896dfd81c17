"""Log lines for people: JSON unwrapped, what is repeated told once, everything else as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.log_lines import readable, unwrapped
from testing.specs import LAW


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"time": "t", "level": "error", "logger": "x", "message": "no weights"}', "ERROR: no weights"),
        ('{"timestamp":"t","level":"INFO","message":"Starting model backend","target":"x"}', "Starting model backend"),
        ('{"timestamp":"t","level":"WARN","fields":{"message":"careful"},"target":"x"}', "WARN: careful"),
        (
            '{"message": "it broke", "level": "error", "exception": "Traceback\\n  x"}',
            "ERROR: it broke\nTraceback\n  x",
        ),
        ("plain words", "plain words"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"message": ""}', '{"message": ""}'),
        ('{"message": 7}', '{"message": 7}'),
        ("{cut off", "{cut off"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_a_line_says_what_it_says(line: str, shown: str) -> None:
    assert unwrapped(line) == shown


def test_what_every_start_repeats_is_told_once_in_the_order_of_the_last() -> None:
    starts = [
        json.dumps({"time": str(at), "level": level, "message": words})
        for at in range(5)
        for level, words in (("info", "loading"), ("error", "no weights"))
    ]
    assert readable(["before", *starts]) == ["before", "loading (5 times)", "ERROR: no weights (5 times)"]


@given(st.lists(st.text(max_size=5), max_size=12))
@LAW
def test_no_line_is_lost(lines: list[str]) -> None:
    shown = readable(lines)
    assert len(shown) == len({unwrapped(line) for line in lines})
    for line in lines:
        assert any(each == unwrapped(line) or each.startswith(f"{unwrapped(line)} (") for each in shown)
