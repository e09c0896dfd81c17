"""The errors of the product, in a short closed vocabulary.

A Problem says what cannot be done and what to do next. HTTP statuses and gRPC codes are tables at the edges, keyed by
``kind``; ``code`` is the constant that REST clients read.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from itertools import islice

LISTED = 20  # a message names no more of what exists


class Kind(StrEnum):
    INVALID = "invalid"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    EXHAUSTED = "exhausted"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    PRECONDITION = "precondition"
    FORBIDDEN = "forbidden"
    UNAUTHENTICATED = "unauthenticated"
    INTERNAL = "internal"


class Problem(Exception):
    """One failure with a name: ``kind`` for the edges, ``code`` for programs, ``message`` for people.

    retry_after_ms: when trying again makes sense, where that is known.
    """

    def __init__(self, kind: Kind, code: str, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


def invalid(message: str, code: str = "VALIDATION_ERROR") -> Problem:
    return Problem(Kind.INVALID, code, message)


def quoted(name: object, limit: int = 80) -> str:
    """A value as an error message shows it: quoted, printable, and short however long it was."""
    text = str(name)
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    return f'"{text.encode("unicode_escape").decode("ascii")}"'


def instances_listed(names: Iterable[str]) -> str:
    """``; instances: a, b``: the end of a message to a caller whose target is none of them, or who named none."""
    return f"; instances: {', '.join(islice(names, LISTED)) or 'none so far'}"


def nearest(word: str, words: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` or nothing."""
    match = get_close_matches(word[:100], list(words), n=1)
    return f' (did you mean "{match[0]}"?)' if match else ""
