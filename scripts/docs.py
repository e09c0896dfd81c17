"""Write docs/rest.md from the descriptions of the two HTTP interfaces. A test holds the committed page to it."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.control import routes as control  # noqa: E402
from appliance.control.schemas import SCHEMAS  # noqa: E402
from appliance.gateway import routes as gateway  # noqa: E402

PAGE = ROOT / "docs" / "rest.md"
HEAD = """# The HTTP interfaces

Written by `scripts/docs.py` from what `GET /openapi.json` answers on each port; tests send generated requests to every
route and compare the answers with it.

Every error of the management API is `{"error": "what and what to do", "code": "CODE", "timestamp": "..."}`. Errors of
the gateway have the shape of their dialect. Where authentication is on, send `Authorization: Bearer KEY`, or the key in
one of the other ways of `security.md`.
"""


def page() -> str:
    parts = [HEAD, "## Management API (9000)\n", *map(section, operations(control.document()))]
    parts += ["### Fields\n", *(fields(name, SCHEMAS[name]) for name in ("Instance", "Model", "Gpu", "Event"))]
    parts += ["## Inference (9002)\n", *map(section, operations(gateway.document()))]
    return "\n".join(parts).rstrip() + "\n"


class Operation(NamedTuple):
    """description: as OpenAPI has it."""

    method: str
    path: str
    description: dict[str, Any]


def operations(document: dict[str, Any]) -> list[Operation]:
    return [
        Operation(method.upper(), path, description)
        for path, methods in document["paths"].items()
        for method, description in methods.items()
    ]


def section(operation: Operation) -> str:
    description = operation.description
    lines = [f"### `{operation.method} {operation.path}`\n"]
    lines.append(f"{description.get('summary') or description.get('description', '')}.\n")
    queries = [each for each in description.get("parameters", []) if each["in"] == "query"]
    lines += [f"- `{each['name']}`: {each.get('description', kind(each['schema']))}" for each in queries]
    if body := description.get("requestBody"):
        kinds = [f"{kind(content['schema'])} as `{media}`" for media, content in body["content"].items()]
        lines.append(f"- body: {', or '.join(kinds)}")
    good = [
        f"{code} {kind(next(iter(answer['content'].values()))['schema']) if 'content' in answer else ''}".strip()
        for code, answer in description["responses"].items()
        if code < "300"
    ]
    bad = ", ".join(code for code in description["responses"] if code >= "300")
    lines.append(f"- answers: {'; '.join(good)}" + (f"; refusals: {bad}" if bad else ""))
    return "\n".join(lines) + "\n"


def kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " / ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    named = schema.get("type", "anything")
    named = " or ".join(each for each in named if each != "null") if isinstance(named, list) else named
    return f"list of {kind(schema['items'])}" if named == "array" and "items" in schema else str(named)


def fields(name: str, schema: dict[str, Any]) -> str:
    rows = [
        f"| `{field}` | {kind(part).replace('|', '/')}{', ' + part['description'] if 'description' in part else ''} |"
        for field, part in schema["properties"].items()
    ]
    return "\n".join([f"**{name}**\n", "| field | what |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
