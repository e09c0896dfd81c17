"""The fields of an instance as those of a form, and back. What a field takes is told by the schema of its check."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

from appliance.control.schemas import ABOUT
from appliance.core.fields import Schema
from appliance.core.instance import CHECKS, InstanceSpec
from appliance.core.problems import invalid, quoted

FIRST = ("model_id", "name", "replicas", "start", "gpu_ids", "idle_unload_secs")  # of those that most people set
DEFAULTS = {each.name: each.default for each in fields_of(InstanceSpec)}
LISTS = ("gpu_ids", "extra_args", "aliases", "node_labels")
SWITCH = ("true", "false")


class FormField(NamedTuple):
    """kind: of its element. choices: of a select, the empty one first."""

    name: str
    about: str
    kind: str
    choices: tuple[str, ...]
    value: str
    placeholder: str


def form_fields(values: Mapping[str, Any]) -> list[FormField]:
    """All fields, those that most people set first. values: as the instance has them now."""
    names = (*FIRST, *sorted(set(CHECKS) - set(FIRST) - {"gpu_id"}))
    return [form_field(name, CHECKS[name].schema, values.get(name)) for name in names]


def form_field(name: str, schema: Schema, value: Any) -> FormField:
    default = DEFAULTS.get(name)
    choices: tuple[str, ...] = ()
    if "enum" in schema:
        choices = ("", *map(str, schema["enum"]))
    elif schema.get("type") == "boolean":
        choices = ("", *SWITCH)
    kind = "select" if choices else "number" if schema.get("type") == "integer" else "text"
    return FormField(name, ABOUT[name], kind, choices, in_words(value), in_words(default))


def in_words(value: Any) -> str:
    """As a person types it."""
    if value is None or not isinstance(value, (str, int, list, tuple)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(quoted_part, map(str, value))) if isinstance(value, (list, tuple)) else str(value)


def quoted_part(part: str) -> str:
    """So that `value_of` reads it as one part. To a shell a comma separates nothing."""
    shell = shlex.quote(part)
    return f"'{part}'" if shell == part and "," in part else shell


def body_of(form: Mapping[str, str], empty_is_default: bool = False) -> dict[str, Any]:
    """The fields that were filled in, as REST takes them. empty_is_default: the others are named, too, as null.

    Raises: Problem.
    """
    body: dict[str, Any] = {}
    for name in CHECKS:
        text = form.get(name, "").strip()
        if text:
            body[name] = value_of(name, text)
        elif empty_is_default and name in form:
            body[name] = None
    return body


def parts_of(text: str) -> list[str]:
    """What is separated by commas or blanks, outside of quotes. Raises: ValueError."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = ", \t\r\n", True, ""
    return list(lexer)


def value_of(name: str, text: str) -> Any:
    """Raises: Problem."""
    schema = CHECKS[name].schema
    if name == "gpu_ids" and text == "auto":
        return text
    if name in LISTS:
        try:
            parts = shlex.split(text) if name == "extra_args" else parts_of(text)
        except ValueError as error:
            raise invalid(f"Field {quoted(name)}: {error}") from None
        return [int(each) if name == "gpu_ids" and each.isdecimal() and len(each) < 19 else each for each in parts]
    if schema.get("type") == "boolean" and text in SWITCH:
        return text == "true"
    is_number = schema.get("type") == "integer" or name in ("port", "prometheus_port", "gpu_id")
    return int(text) if is_number and text.isascii() and text.isdecimal() and len(text) < 19 else text
