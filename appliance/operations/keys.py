"""The verbs of API keys: create, list, revoke. A key is shown once, when it is made; only its SHA-256 is kept.

Control runs them for REST, and the command line where the appliance is down. All programs look at the files themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.core import access
from appliance.core.access import KEY_PREFIX, Key
from appliance.core.events import Event
from appliance.core.problems import Kind, Problem, invalid, nearest, quoted
from appliance.drivers import keysfile
from appliance.files.locking import locked
from appliance.node.authentication import config_path, keys_path
from appliance.node.context import Node

KEY_BYTES = 32
LOCK_SECS = 10


def create(node: Node, body: Any) -> dict[str, str]:
    """A new key with its name and role: it cannot be found out afterwards. Raises: Problem KEY_EXISTS, or invalid."""
    name, role = access.new_key(body)
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with changing(node) as path:
        keys = own(path)
        if name in [key.name for key in (*keys, *configured(node))]:
            words = f'There is a key "{name}" already: revoke it, or choose another name'
            raise Problem(Kind.CONFLICT, "KEY_EXISTS", words)
        keysfile.write(path, (*keys, Key(name, access.digest(secret), role)))
    node.journal.record(Event.KEY_CREATED, None, f'Key "{name}" with the role {role} created')
    return {"name": name, "role": role, "key": secret}


def listed(node: Node) -> list[dict[str, str]]:
    """Names and roles, and the file that each key stands in."""
    path = keys_path(node.settings)
    from_configuration = [{"name": key.name, "role": key.role, "from": "configuration"} for key in configured(node)]
    return from_configuration + [{"name": key.name, "role": key.role, "from": str(path)} for key in own(path)]


def revoke(node: Node, name: str) -> dict[str, Any]:
    """Take a key away; ``left``: how many keys there are then. Raises: Problem KEY_NOT_FOUND, or invalid."""
    with changing(node) as path:
        keys, others = own(path), configured(node)
        revoked = next((key for key in keys if key.name == name), None)
        if revoked is None:
            if name in [key.name for key in others]:
                raise invalid(f'Key "{name}" stands in the configuration file: take it out there')
            hint = nearest(name, [key.name for key in keys])
            raise Problem(Kind.NOT_FOUND, "KEY_NOT_FOUND", f"There is no key {quoted(name)}{hint}")
        left = tuple(key for key in keys if key is not revoked)
        keysfile.write(path, left)
    node.journal.record(Event.KEY_REVOKED, None, f'Key "{name}" revoked')
    return {"name": name, "role": revoked.role, "left": len(left) + len(others)}


def own(path: Path) -> tuple[Key, ...]:
    try:
        return keysfile.read(path)
    except FileNotFoundError:
        return ()
    except PermissionError as error:
        words = f"Cannot read {path}: {error.strerror}. It must belong to the owner of its folder: chown it to him"
        raise invalid(words) from error
    except (OSError, ValueError) as error:
        raise invalid(f"Cannot read {path}: {error}") from error


def configured(node: Node) -> tuple[Key, ...]:
    """`[[keys]]` of the configuration file as it is now; what was read at the start while it cannot be read."""
    path = config_path()
    try:
        return keysfile.read(path) if path else ()
    except (OSError, ValueError, Problem):
        return node.settings.keys


@contextmanager
def changing(node: Node) -> Iterator[Path]:
    """The right to change the key file, and its path. Raises: Problem; then nothing changed."""
    path = keys_path(node.settings)
    words = f"Another change of {path} takes longer than {LOCK_SECS} s. Nothing changed"
    taken = Problem(Kind.UNAVAILABLE, "BACKEND_UNAVAILABLE", words)

    def refused(error: OSError) -> Problem:
        return Problem(Kind.EXHAUSTED, "STATE_WRITE_FAILED", f"Cannot change {path}: {error}. Nothing changed")

    with locked(path.with_suffix(".lock"), LOCK_SECS, taken, refused, mode=0o700):
        yield path
