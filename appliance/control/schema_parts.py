"""The pieces of which the schemas of the management API are made."""

from __future__ import annotations

from typing import Any

from appliance.core.fields import Schema

NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BINARY: Schema = {"type": "string", "format": "binary"}
NUMBER: Schema = {"type": "number", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def closed(required: tuple[str, ...], **properties: Schema) -> Schema:
    """What we take: unknown fields are refused."""
    return record(required, **properties) | {"additionalProperties": False}


def maybe(schema: Schema) -> Schema:
    """That, or null. What is said about a field stands beside the choice."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    plain = {key: value for key, value in schema.items() if key not in about}
    return about | {"anyOf": [*plain.get("anyOf", [plain]), NULL]}


def told(words: dict[str, str], properties: dict[str, Schema]) -> dict[str, Schema]:
    """Properties with what each means."""
    return {name: {**schema, "description": words[name]} for name, schema in properties.items()}
