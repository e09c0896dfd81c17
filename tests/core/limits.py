"""Values at each limit of a JSON Schema, and beyond it: what a validator must accept, and what it must refuse."""

from typing import Any

import jsonschema_rs

from appliance.core.addresses import ORIGIN, URL_HOST
from appliance.core.fields import PRINTABLE, Schema
from appliance.core.instance import LABEL
from appliance.core.model_names import HUB_ID, PATH, REVISION

# What patterns match, and what they do not; `a` repeated matches PRINTABLE at every length.
SAMPLES: dict[str, tuple[list[str], list[str]]] = {
    r"^[A-Za-z][A-Za-z0-9._-]{0,63}$": (["a", "Z" + "-" * 63], ["", "1", ".a", "a" * 65, "a\n", "é"]),
    r"^GPU-[0-9A-Za-z-]{1,100}$": (["GPU-0", "GPU-" + "a" * 100], ["GPU-", "GPU-" + "a" * 101, "0", "GPU-é"]),
    r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$": (["a", "0" + "@" * 63], ["", ".", "a" * 65, "a b"]),
    r"^[0-9a-f]{64}$": (["0" * 64], ["0" * 63, "0" * 65, "A" * 64]),
    f"^{HUB_ID.pattern}$": (
        ["a", "a" * 96, "a/b", f"{'a' * 96}/{'b' * 96}"],
        ["", "a" * 97, "a/", "a/b/c", ".a", "a."],
    ),
    PATH: (["/a", "/" + "a" * 1023], ["/", "/" + "a" * 1024, "/a\n"]),
    r"^.+:[0-9]{1,5}$": (["a:1", "[::1]:65535"], ["", "a", ":1", "a:", "a:x", "a b:1", "a:0", "a:65536", "::1:1"]),
    r"^(state|(static|dns):/.+|ray:.+:[0-9]+)$": (
        ["state", "static:/a", "dns:/a.toml", "ray:a:1"],
        ["", "State", "static:a", "dns:", "ray:/a", "ray:a:0", "ray::1"],
    ),
    f"^({ORIGIN.pattern})$": (
        ["*", "https://a", "http://[::1]:8080", "app://" + "a" * 249],
        ["", "a", "https://a/", "https://A", "https://", "https://a\n", "app://" + "a" * 250],
    ),
    f"^{URL_HOST.pattern}$": (
        ["a", "A:1", "::1", "a" * 255],
        ["", "a/b", "http://a", "u@a", "[::1]", "a\n", "a" * 256],
    ),
    f"^{LABEL.pattern}$": (
        ["a=b", f"{'a' * 63}={'b' * 63}"],
        ["", "a", "=b", "a=", f"{'a' * 64}=b", f"a={'b' * 64}", "a=b=c"],
    ),
    f"^{REVISION.pattern}$": (["a", "a" * 256, "refs/pr/1", "1.0+onnx"], ["/a", "a b", "a:b", "a" * 257, ""]),
}


def within(schema: Schema) -> list[Any]:
    """At least one for each limit."""
    if "anyOf" in schema:
        return [value for each in schema["anyOf"] for value in within(each)]
    if "enum" in schema:
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    match schema["type"]:
        case "integer" | "number":
            return [schema["minimum"], schema["maximum"]]
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case "array":
            item = within(schema["items"])[0]
            return [[item] * max(1, schema.get("minItems", 0)), [item] * min(schema.get("maxItems", 3), 100_000)]
        case "string" if schema.get("pattern", PRINTABLE) == PRINTABLE:
            return ["a" * max(1, schema.get("minLength", 0)), "a" * schema.get("maxLength", 5000)]
        case "string":
            return SAMPLES[schema["pattern"]][0]
        case _:
            return []


def beyond(schema: Schema) -> list[Any]:
    """Of each limit the other side, and values of other types; none of them is within the schema."""
    if "anyOf" in schema:
        values = [value for each in schema["anyOf"] for value in beyond(each)]
        return [value for value in values if not jsonschema_rs.is_valid(schema, value)]
    if "enum" in schema or "const" in schema:
        return ["none of them", 7, ["none"]]
    match schema["type"]:
        case "integer":
            return [schema["minimum"] - 1, schema["maximum"] + 1, True, 0.5, {}]
        case "number":
            return [schema["minimum"] - 0.01, schema["maximum"] + 0.01, True, {}]
        case "boolean":
            return [0, 1, {}]
        case "null":
            return [0, {}]
        case "array":
            wrong = [[value] for value in beyond(schema["items"])]
            item = within(schema["items"])[0]
            few: list[Any] = [[]] if schema.get("minItems") else []
            return [*wrong, *few, *([[item] * (schema["maxItems"] + 1)] if "maxItems" in schema else []), {}]
        case "string" if schema.get("pattern", PRINTABLE) == PRINTABLE:
            short = ["a" * (schema["minLength"] - 1)] if schema.get("minLength") else []
            long = ["a" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
            return [*short, *long, *(["a\0", "a\u2028"] if "pattern" in schema else []), 7, True, {}]
        case "string":
            return [*SAMPLES[schema["pattern"]][1], 7]
        case _:
            return [7]
