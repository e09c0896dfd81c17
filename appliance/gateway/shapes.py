"""The shapes of what clients send, checked field by field. Unknown fields are ignored, as in the dialects.

Each field's check carries its JSON Schema, from which `openapi` describes the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from appliance.core import fields as check
from appliance.core.fields import Schema, shown
from appliance.gateway.refusals import Reason, Refusal

MOST_TEXTS = 100_000
LARGEST_ID = 2**32 - 1
PLAIN_JSON = re.compile(r"true|false|0|[1-9][0-9]{0,18}")

Input = str | list[int]  # a text, or the ids of its tokens


@check.with_schema({"type": "string"})
def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {shown(value)}")
    return value


@check.with_schema({"type": "array", "items": string.schema})
def strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings, not {shown(value)}")
    for at, entry in enumerate(value):
        if not isinstance(entry, str):
            raise ValueError(f"must be a list of strings, but entry {at} is {shown(entry)}")
    return value


# -- fields of one value ----------------------------------------------------------------------------------------------

UINT = check.whole(0, LARGEST_ID)
DIMENSIONS = check.Check(UINT.accept, UINT.schema | {"minimum": 1})  # 0 is refused by the engine, which knows the width
DIRECTION = check.one_of("Left", "left", "Right", "right")
ENCODING_FORMAT = check.one_of("float", "base64")
TOP_N = check.whole(1, 2**31)
ONE = check.whole(1, 1)

# -- what stands for texts --------------------------------------------------------------------------------------------

TEXT_SCHEMA: Schema = {"type": "string", "minLength": 1}
IDS_SCHEMA: Schema = {"type": "array", "items": UINT.schema, "minItems": 1}
TEXTS_SCHEMA: Schema = {"type": "array", "items": TEXT_SCHEMA, "minItems": 1, "maxItems": MOST_TEXTS}
INPUTS_SCHEMA: Schema = {
    "anyOf": [TEXT_SCHEMA, IDS_SCHEMA, TEXTS_SCHEMA | {"items": {"anyOf": [TEXT_SCHEMA, IDS_SCHEMA]}}]
}
PAIR_SCHEMA: Schema = {"type": "array", "items": string.schema, "minItems": 1, "maxItems": 2}


def as_json(checked: check.Check) -> check.Check:
    """The check of a number or a truth value for text: as JSON writes it, in no other way."""
    return check.Check(lambda text: checked(orjson.loads(text) if PLAIN_JSON.fullmatch(text) else text), checked.schema)


def is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ID


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_id, value))


def get(body: dict[str, Any], key: str, checked: Callable[[Any], Any], default: Any = None, null: bool = True) -> Any:
    """One field; ``default`` when it is absent, or null where ``null`` is allowed. Raises: Refusal that names it."""
    if key not in body or (null and body[key] is None):
        return default
    try:
        return checked(body[key])
    except ValueError as error:
        raise wrong_shape(key, str(error)) from None


def is_given(body: dict[str, Any], key: str) -> bool:
    """Whether a field is there; null, as clients send what was not set, is not."""
    return body.get(key) is not None


def need(body: dict[str, Any], key: str, checked: Callable[[Any], Any]) -> Any:
    if key not in body:
        raise wrong_shape(key, "is missing")
    return get(body, key, checked, null=False)


def wrong_shape(key: str, what: str) -> Refusal:
    return Refusal(Reason.SHAPE, f"Wrong shape of the JSON body: `{key}` {what}")


def inputs(body: dict[str, Any], key: str) -> list[Input]:
    """TEI's `Input` (and OpenAI's): a string; token ids; or a list of both kinds. Raises: Refusal."""
    value = body.get(key)
    if isinstance(value, str) or is_ids(value):
        texts: list[Input] = [value]  # type: ignore[list-item]
    elif isinstance(value, list):
        for at, entry in enumerate(value):
            if is_id(value[0]) and not is_id(entry):  # one text as ids
                raise wrong_shape(key, f"must hold token ids from 0 to {LARGEST_ID}, but entry {at} is {shown(entry)}")
            if not (is_id(value[0]) or isinstance(entry, str) or is_ids(entry)):
                raise wrong_shape(key, f"must hold strings or lists of token ids, but entry {at} is {shown(entry)}")
        texts = value
    elif key in body:
        raise wrong_shape(key, f"must be a string, a list of strings, or token ids, not {shown(value)}")
    else:
        raise wrong_shape(key, "is missing")
    return bounded(texts, key)


def bounded(texts: list[Any], key: str) -> list[Any]:
    """Raises: Refusal when there are too many, none, or an empty one among them."""
    if len(texts) > MOST_TEXTS:
        raise Refusal(Reason.VALIDATION, f"batch size {len(texts)} > maximum allowed batch size {MOST_TEXTS}")
    for at, entry in enumerate(texts):
        if not entry:
            raise Refusal(Reason.EMPTY, f"`{key}` cannot be empty" + (f" (input {at})" if len(texts) > 1 else ""))
    if not texts:
        raise Refusal(Reason.EMPTY, f"`{key}` cannot be empty")
    return texts


def pairs(body: dict[str, Any]) -> tuple[list[list[str]], bool]:
    """TEI's `PredictInput`: (texts of each prediction, whether it is only one)."""
    value = body.get("inputs")
    if isinstance(value, str):
        return [[value]], True
    if isinstance(value, list) and 1 <= len(value) <= 2 and all(isinstance(entry, str) for entry in value):
        return [value], True
    if isinstance(value, list) and value and all(is_pair(entry) for entry in value):
        return bounded(value, "inputs"), False
    raise wrong_shape("inputs", "must be a string, a pair [a, b], or a list of [text] and [a, b]")


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 2 and all(isinstance(entry, str) for entry in value)
