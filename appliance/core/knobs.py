"""One setting, and one table of settings, in a dataclass."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from appliance.core import fields as check


def knob(default: Any, checked: check.Check, env: str | None = None) -> Any:
    """One setting: its default, its check and the environment variable that overrides the file."""
    return field(default=default, metadata={"check": checked, "env": env})


def values_of(cls: Any, name: str, table: Any) -> dict[str, Any]:
    """The checked values of one table. Raises: ValueError or Problem that names the key below ``name``."""
    checks = {knob.name: knob.metadata["check"] for knob in fields(cls)}
    keys = check.Fields(checks, name=f'"{name}.{{}}"', unknown=f'Unknown key "{name}.{{}}"', shown=str)
    return keys.values(check.table(table))
