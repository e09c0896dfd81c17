"""Checks for the values of a mapping that a person or a program wrote: TOML, JSON and the command line share them.

A check takes one value and returns it in its final form, or raises ``ValueError`` with the second half of a sentence:
"must be a whole number between 1 and 65535, not "8080"". It carries the same rule as JSON Schema, from which both
OpenAPI documents take their limits, patterns and choices. `Fields` checks a whole mapping, each field with its check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.core.problems import Problem, invalid, nearest, quoted

Schema = dict[str, Any]

CONTROL_CHARACTERS = frozenset(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029]))
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"  # the same as a pattern of JSON Schema


@dataclass(frozen=True)
class Check:
    """``accept`` returns the value in its final form, or raises ValueError. ``schema`` says what it accepts, as far as
    JSON Schema can say it."""

    accept: Callable[[Any], Any]
    schema: Schema = field(default_factory=dict)

    def __call__(self, value: Any) -> Any:
        return self.accept(value)


def with_schema(schema: Schema) -> Callable[[Callable[[Any], Any]], Check]:
    """Makes a check of a function: ``@with_schema({"type": "string"})``."""
    return lambda accept: Check(accept, schema)


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


# -- checks of one value ----------------------------------------------------------------------------------------------


def whole(low: int, high: int) -> Check:
    @with_schema({"type": "integer", "minimum": low, "maximum": high})
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number between {low} and {high}, not {shown(value)}")
        return value

    return check


def number(low: float, high: float) -> Check:
    @with_schema({"type": "number", "minimum": low, "maximum": high})
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"must be a number between {low:g} and {high:g}, not {shown(value)}")
        return float(value)

    return check


def decimal(text: str) -> int | None:
    """The number that at most 18 digits 0-9 write, else None. `int` takes signs, blanks, underlines, and the digits of
    every script; `isdigit` takes more than `int` does."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


@with_schema({"type": "boolean"})
def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


def text(longest: int = 4096, shortest: int = 1) -> Check:
    """One line of printable text. Control characters never reach a command line, a log or supervisor's files."""

    @with_schema({"type": "string", "minLength": shortest, "maxLength": longest, "pattern": PRINTABLE})
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
    @with_schema({"enum": list(choices)})
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {shown(value)}")
        return str(value)

    return check


def sequence_of(item: Check, longest: int) -> Check:
    @with_schema({"type": "array", "items": item.schema, "maxItems": longest})
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"must be a list, not {shown(value)}")
        if len(value) > longest:
            raise ValueError(f"must have at most {longest} entries, not {len(value)}")
        return tuple(item(entry) for entry in value)

    return check


@with_schema({"type": "object"})
def table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a table, not {shown(value)}")
    return value


anything = Check(lambda value: value)


# -- whole mappings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fields:
    """The fields that a mapping may have, how each is checked, and how an error names one.

    name: of a field, and of one that is not among ``checks``; ``{}`` is its place. shown: an unknown field as a message
    may repeat it.
    """

    checks: Mapping[str, Check]
    required: tuple[str, ...] = ()
    null_is_absent: bool = False
    name: str = 'Field "{}"'
    unknown: str = "Unknown field {}"
    shown: Callable[[object], str] = quoted

    def values(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of the fields that are there. Raises: Problem (invalid) that names the first wrong one.

        Where every field is required, what is unknown is wrong first, and then they are checked in their own order.
        """
        present = {
            key: value
            for key, value in body.items()
            if not (self.null_is_absent and value is None and key in self.checks)
        }
        first = [key for key in present if key not in self.checks] if self.all_required else list(present)
        values: dict[str, Any] = {}
        for key in dict.fromkeys((*first, *self.required)):
            if key not in self.checks:
                raise invalid(f"{self.unknown.format(self.shown(key))}{nearest(str(key), self.checks)}")
            if key not in present:
                raise invalid(f"{self.name.format(key)} is required")
            values[key] = self.value(key, present[key], self.name.format(key))
        return values

    def value(self, key: str, value: Any, source: str) -> Any:
        """One checked value. source: what the error names."""
        try:
            return self.checks[key](value)
        except ValueError as error:
            raise invalid(f"{source} {error}") from None
        except Problem as problem:  # of a table within
            raise invalid(f"{source}: {problem.message}") from None

    @property
    def all_required(self) -> bool:
        return len(self.required) == len(self.checks)


def required_object(body: Any, sentence: str) -> Mapping[str, Any]:
    """``body`` where it is a mapping. Raises: Problem; sentence: what it must be."""
    if not isinstance(body, Mapping):
        raise invalid(f"{sentence}, not {shown(body)}")
    return body


def beyond(mapping: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What a file has besides our own fields."""
    return {key: value for key, value in mapping.items() if key not in own}
