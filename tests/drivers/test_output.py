"""A log line is one JSON object, whatever is in the message."""

import json
import logging
import sys

import pytest

from appliance.drivers.output import JsonLines


def line(message: str, **extra: object) -> dict[str, object]:
    record = logging.LogRecord("a.b", logging.WARNING, "x.py", 1, message, (), None)
    vars(record).update(extra)
    text = JsonLines().format(record)
    assert "\n" not in text
    parsed: dict[str, object] = json.loads(text)
    return parsed


@pytest.mark.parametrize("message", ["plain", "two\nlines", '"quoted"', "\udcff"])
def test_a_message_is_one_line(message: str) -> None:
    parsed = line(message)
    assert (parsed["level"], parsed["logger"], parsed["message"]) == ("warning", "a.b", message)
    assert parsed.keys() == {"time", "level", "logger", "message"}


def test_event_and_instance_are_fields_of_their_own() -> None:
    parsed = line("x", event="created", instance=None, other=1)
    assert (parsed["event"], parsed["instance"]) == ("created", None)
    assert "other" not in parsed


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        parsed = line("x", exc_info=sys.exc_info())
    assert "ValueError: bad" in str(parsed["exception"])
