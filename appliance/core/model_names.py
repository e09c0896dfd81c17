"""How a model is named: its id, and its revision. The rules stand here once, in two strengths.

registered   models that are added, fetched and carried about: the name becomes a path in the cache and a manifest
served       what an instance may ask its engine for, also in state files of earlier releases; new instances are
             refused a revision that leads out of the cache besides
"""

from __future__ import annotations

import re
from typing import Any

from appliance.core.fields import Check, shown, text, with_schema
from appliance.core.problems import invalid

LONGEST_PATH = 1024
LONGEST_SERVED = 512
LONGEST_REVISION = 256
PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
HUB_ID = re.compile(rf"(?:{PART}/)?{PART}")
PATH = r"^/[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"  # of printable text, as a pattern of JSON Schema
# What git allows in the name of a branch or tag, of ASCII: it is a path beneath refs, and no option of a command.
REVISION_PART = r"[!-),+0-9;->@-Z\]_-}][!-)+-.0-9;->@-Z\]_-}]*"
REVISION = re.compile(rf"{REVISION_PART}(?:/{REVISION_PART})*")

served_text = text(LONGEST_SERVED)
path_text = text(LONGEST_PATH)
revision_text = text(LONGEST_REVISION)


@with_schema(
    {
        "anyOf": [
            {"type": "string", "pattern": f"^{HUB_ID.pattern}$"},
            path_text.schema | {"pattern": PATH},
        ],
        "description": 'a hub id ("org/name"), or the absolute path of a folder',
    }
)
def registered_id(value: Any) -> str:
    name: str = path_text(value)
    if name.startswith("/"):
        if any(part in ("", ".", "..") for part in name[1:].split("/")):
            raise ValueError(f"must be a plain absolute path, without '.' and '..', not {shown(name)}")
        return name
    if not HUB_ID.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git"):
        raise ValueError(f'must be a hub id ("org/name") or the absolute path of a folder, not {shown(name)}')
    return name


@with_schema(served_text.schema | {"description": "hub id or local folder"})
def served_id(value: Any) -> str:
    name: str = served_text(value)
    if name.startswith("-") or name != name.strip():
        raise ValueError(f"must be a hub id or a local folder, not {shown(value)}")
    return name


@with_schema(revision_text.schema | {"pattern": f"^{REVISION.pattern}$"})
def registered_revision(value: Any) -> str:
    name: str = revision_text(value)
    if not REVISION.fullmatch(name) or ".." in name or "@{" in name or name.endswith("."):
        raise no_revision(name)
    return name


@with_schema(revision_text.schema)
def served_revision(value: Any) -> str:
    name: str = revision_text(value)
    if name.startswith("-"):
        raise no_revision(name)
    return name


def no_revision(name: str) -> ValueError:
    return ValueError(f"must be a branch, tag or commit, not {shown(name)}")


def leads_out(revision: str) -> bool:
    """Whether the name of a revision, as the path it is in the cache, leads out of its folder there."""
    return revision.startswith("/") or ".." in revision.split("/")


def refuse_leading_out(revision: str | None) -> None:
    """Of a new instance; `served_revision` cannot, because state files of earlier releases may have such. Raises:
    Problem."""
    if revision and leads_out(revision):
        raise invalid(f'Field "revision" {no_revision(revision)}')


# Of a model that is registered: a missing or empty revision follows the hub's main.
PINNED = Check(lambda value: registered_revision(value) if value else "")
