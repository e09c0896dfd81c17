"""Checks for one value of a mapping that a person or a program wrote: TOML, JSON and the command line share them.

A check takes the value and returns it in its final form, or raises ``ValueError`` with the second half of a
sentence: "must be a whole number between 1 and 65535, not "8080"".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from appliance.core.problems import quoted

Check = Callable[[Any], Any]

CONTROL_CHARACTERS = frozenset(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029]))


def shown(value: object) -> str:
    """The offending value as TOML and JSON readers would recognise it."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "a number of that size" if isinstance(value, int) and abs(value) > 10**20 else str(value)
    return {"dict": "a table", "list": "a list"}.get(type(value).__name__, type(value).__name__)


def whole(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number between {low} and {high}, not {shown(value)}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"must be a number between {low:g} and {high:g}, not {shown(value)}")
        return float(value)

    return check


def decimal(text: str) -> int | None:
    """The number that at most 18 digits 0-9 write, else None. `int` takes signs, blanks, underlines, and the digits of
    every script; `isdigit` takes more than `int` does."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


def text(longest: int = 4096, shortest: int = 1) -> Check:
    """One line of printable text. Control characters never reach a command line, a log or supervisor's files."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {shown(value)}")
        if not shortest <= len(value) <= longest:
            raise ValueError(f"must have {shortest} to {longest} characters, not {len(value)}")
        if not CONTROL_CHARACTERS.isdisjoint(value):
            raise ValueError(f"must not contain control characters or line breaks: {shown(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"must be valid Unicode, without lone surrogates: {shown(value)}") from None
        return value

    return check


def one_of(*choices: str) -> Check:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {shown(value)}")
        return str(value)

    return check


def sequence_of(item: Check, longest: int) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"must be a list, not {shown(value)}")
        if len(value) > longest:
            raise ValueError(f"must have at most {longest} entries, not {len(value)}")
        return tuple(item(entry) for entry in value)

    return check


def beyond(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What a file has besides our own fields."""
    return {key: value for key, value in given.items() if key not in own}


def table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a table, not {shown(value)}")
    return value
