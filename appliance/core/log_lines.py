"""Log lines for people: what a JSON line says, and what was said several times once.

TEI and the embedded engine write one JSON object a line. A replica that dies at each start says the same each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

MESSAGES = ("message", "msg")
LEVELS = ("level", "levelname", "severity")
QUIET = ("", "info", "debug", "trace")


def readable(lines: Sequence[str]) -> list[str]:
    """The lines in their order, JSON unwrapped; of equal ones the last, with how many there were."""
    plain = [unwrapped(line) for line in lines]
    times = Counter(plain)
    last_first = dict.fromkeys(reversed(plain))
    return [f"{line} ({times[line]} times)" if times[line] > 1 else line for line in reversed(last_first)]


def unwrapped(line: str) -> str:
    """Level and message of a line of JSON, and its exception; any other line as it is."""
    try:
        told = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return line
    if not isinstance(told, dict):
        return line
    inner = told.get("fields")
    values = {**told, **inner} if isinstance(inner, dict) else told  # as TEI's library nests them unless told not to
    message = first(values, MESSAGES)
    if not message:
        return line
    level = first(values, LEVELS)
    loud = level if level.lower() not in QUIET else ""
    exception = values.get("exception")
    return f"{loud.upper() + ': ' if loud else ''}{message}{chr(10) + exception if isinstance(exception, str) else ''}"


def first(values: dict[str, object], keys: Sequence[str]) -> str:
    return next((value for key in keys if isinstance(value := values.get(key), str) and value), "")
