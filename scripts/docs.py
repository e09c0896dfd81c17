"""Write docs/rest.md from the descriptions of the two HTTP interfaces. A test holds the committed page to it."""

import sys
from collections.abc import Iterator
from dataclasses import MISSING
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from appliance.control import routes as control  # noqa: E402
from appliance.core.instance import InstanceSpec  # noqa: E402
from appliance.gateway import routes as gateway  # noqa: E402
from appliance.gateway import schemas as bodies  # noqa: E402

PAGE = ROOT / "docs" / "rest.md"
HEAD = """# The HTTP interfaces

Written by `scripts/docs.py` from what `GET /openapi.json` answers on each port; tests send generated requests to every
route and compare the answers with it.

Every error of the management API is `{"error": "what and what to do", "code": "CODE", "timestamp": "..."}`. Errors of
the gateway have the shape of their dialect. Where authentication is on, send `Authorization: Bearer KEY`, or the key in
one of the other ways of `security.md`. HEAD is answered wherever GET is.
"""
FIELDS = """### Fields

What is left out, or null, has its default.
"""
TAKEN = ("NewInstance", "ChangedInstance", "LoadOptions", "NewModel", "NewKey")
TOLD = {
    "Instance": "The fields of NewInstance as they are now, with what was chosen, and:",
    "Model": "",
    "Gpu": "",
    "Series": "Lists have as many values as there are steps; what was not measured is null.",
    "Event": "And what belongs to each event, such as `replica`, `cause` and `last_lines`.",
}
# Paths of the gateway that its description leaves out, and that are no other names of one that it has.
BESIDE = {
    "/v1/models/{model:path}": "OpenAI: an instance, by its name, an alias, or its model's id",
    "/api/version": "Ollama: our version",
    "/api/show": "Ollama: what a model does",
    "/": "TEI: what the model does; GET as `/health`",
    "/metrics": "TEI: its metrics of every replica and our own counts, or those of the instance that is named",
    "/openapi.json": "this interface, described",
    "/docs": "the same as a page, which lets one try it, with a field for the key; itself it needs none",
    "/docs/{file}": "what that page is made of",
}
OTHER_PATHS = """### Other paths

Each path of this port is there as `/instances/NAME/…`, too, and then means that instance. Besides:

| path | what |
|---|---|"""


def page() -> str:
    management = control.document()
    schemas = management["components"]["schemas"]
    defaults = {each.name: each.default for each in fields_of(InstanceSpec) if each.default is not MISSING}
    parts = [HEAD, "## Management API (9000)\n", *map(section, operations(management)), FIELDS]
    parts += [
        taken(name, schemas[name], defaults if name in ("NewInstance", "ChangedInstance") else {}) for name in TAKEN
    ]
    shared = schemas["NewInstance"]["properties"]
    parts += [told(name, words, schemas[name], shared if name == "Instance" else {}) for name, words in TOLD.items()]
    serving = operations(gateway.document())
    requests = dict.fromkeys(name for each in serving if (name := body_of(each)))
    parts += ["## Inference (9002)\n", *map(section, serving), other_paths(), "### Bodies\n"]
    parts += [taken(name, bodies.SCHEMAS[name], {}) for name in requests]
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


def body_of(operation: Operation) -> str:
    """The name of the schema of its body; empty without one."""
    content = operation.description.get("requestBody", {}).get("content", {})
    return next((kind(each["schema"]) for each in content.values()), "")


def section(operation: Operation) -> str:
    description = operation.description
    lines = [f"### `{operation.method} {operation.path}`\n"]
    lines.append(f"{description.get('summary') or description.get('description', '')}.\n")
    queries = [each for each in description.get("parameters", []) if each["in"] in ("query", "header")]
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


def other_paths() -> str:
    nobody: Any = None
    resources = {route.path: route.resource(nobody) for route in gateway.ROUTES}
    first: dict[type, str] = {}  # of each kind of resource the path that is described, or that has words here
    for route in gateway.ROUTES:
        if route.operation or route.path in BESIDE:
            first.setdefault(type(resources[route.path]), route.path)
    lines = [OTHER_PATHS]
    for path in (route.path for route in gateway.ROUTES if route.operation is None):
        methods = [method for method in ("GET", "POST") if hasattr(resources[path], f"on_{method.lower()}")]
        what = BESIDE.get(path) or f"as `{methods[-1]} {first[type(resources[path])]}`"
        lines.append(f"| {', '.join(f'`{method} {path}`' for method in methods)} | {what} |")
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
    if named != "array" or "items" not in schema:
        return str(named)
    items = kind(schema["items"])
    return f"list of ({items})" if " or " in items else f"list of {items}"


def bounded(schema: dict[str, Any]) -> str:
    """A schema in a few words, with its limits."""
    if "anyOf" in schema:
        return " or ".join(bounded(each) for each in schema["anyOf"] if each != {"type": "null"})
    limits = limits_of(schema, "minimum", "maximum", "") or limits_of(schema, "minItems", "maxItems", " entries")
    limits = limits or limits_of(schema, "minLength", "maxLength", " characters")
    return kind(schema) + (f" ({limits})" if limits else "")


def limits_of(schema: dict[str, Any], least: str, most: str, of_what: str) -> str:
    """of_what: with a blank before it; a lower limit alone is that of a list or a text."""
    low, high = schema.get(least), schema.get(most)
    if high is not None:
        return f"{low} to {high}{of_what}" if low is not None else f"at most {high}{of_what}"
    return "not empty" if low else ""


def taken(name: str, schema: dict[str, Any], defaults: dict[str, Any]) -> str:
    """The fields of a body. defaults: of fields whose schema has none."""
    about = [f"{schema['description'].capitalize()}.\n"] if "description" in schema else []
    lines = [f"**{name}**\n", *about, "| field | type and range | default | meaning |", "|---|---|---|---|"]
    lines += rows(schema, defaults)
    return "\n".join(lines) + "\n"


def rows(schema: dict[str, Any], defaults: dict[str, Any], within: str = "") -> Iterator[str]:
    """A row for each field, also for those of objects within."""
    for name, part in schema["properties"].items():
        default = shown(part.get("default", defaults.get(name)))
        needed = "required" if name in schema.get("required", ()) else default
        yield f"| `{within}{name}` | {bounded(part)} | {needed} | {part['description']} |"
        if "properties" in part:
            yield from rows(part, {}, f"{name}.")


def told(name: str, words: str, schema: dict[str, Any], known: dict[str, Any]) -> str:
    """The fields of an answer. known: properties that stand in another table."""
    lines = [f"**{name}**\n", *([f"{words}\n"] if words else []), "| field | type | meaning |", "|---|---|---|"]
    for field, part in schema["properties"].items():
        if field not in known:
            lines.append(f"| `{field}` | {kind(part)} | {part['description']} |")
    return "\n".join(lines) + "\n"


def shown(default: Any) -> str:
    """A default as JSON has it."""
    if default is None or default == ():
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
