"""`appliance keys`: API keys of this appliance. A key is shown once, when it is made; only its SHA-256 is kept."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

from filelock import FileLock

from appliance.box import Appliance
from appliance.cli.terminal import say, say_json, table
from appliance.core import access
from appliance.core.access import KEY_PREFIX, ROLES, Key
from appliance.core.problems import Kind, Problem, invalid, nearest
from appliance.core.settings import Settings
from appliance.drivers import keysfile
from appliance.guard import keys_path

KEY_BYTES = 32


def create(given: argparse.Namespace, settings: Settings) -> int:
    """Make a key and print it: nobody can find it out afterwards."""
    try:
        name = access.key_name(given.name)
    except ValueError as error:
        raise invalid(f"The name of a key {error}") from None
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with changing(settings) as path:
        known = own(path)
        if name in [key.name for key in (*known, *settings.keys)]:
            words = f'There is a key "{name}" already: revoke it, or choose another name'
            raise Problem(Kind.CONFLICT, "KEY_EXISTS", words)
        keysfile.write(path, (*known, Key(name, access.digest(secret), given.role)))
    message = f'Key "{name}" with the role {given.role} created'
    Appliance.at(settings).journal.record("key_created", None, message)
    if given.json:
        say_json({"name": name, "role": given.role, "key": secret})
    else:
        say(secret)
    return 0


def listed(given: argparse.Namespace, settings: Settings) -> int:
    path = keys_path(settings)
    found = [{"name": key.name, "role": key.role, "from": "configuration"} for key in settings.keys]
    found += [{"name": key.name, "role": key.role, "from": str(path)} for key in own(path)]
    if given.json:
        say_json(found)
    elif found:
        say(table(found, ("name", "role", "from")))
    else:
        say("No key is asked for" if not path.exists() else "There is no key, and everybody is kept out")
    return 0


def revoke(given: argparse.Namespace, settings: Settings) -> int:
    with changing(settings) as path:
        known = own(path)
        if given.name not in [key.name for key in known]:
            if given.name in [key.name for key in settings.keys]:
                raise invalid(f'Key "{given.name}" stands in the configuration file: take it out there')
            hint = nearest(given.name, [key.name for key in known])
            raise Problem(Kind.NOT_FOUND, "KEY_NOT_FOUND", f'There is no key "{given.name}"{hint}')
        left = tuple(key for key in known if key.name != given.name)
        keysfile.write(path, left)
    Appliance.at(settings).journal.record("key_revoked", None, f'Key "{given.name}" revoked')
    say(f'Key "{given.name}" is revoked' + ("" if left or settings.keys else ": no key is left, everybody is kept out"))
    return 0


def own(path: Path) -> tuple[Key, ...]:
    try:
        return keysfile.read(path)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise invalid(f"Cannot read {path}: {error}") from error


class changing:
    """The right to change the key file, as a context manager that gives its path."""

    def __init__(self, settings: Settings) -> None:
        self.path = keys_path(settings)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.path.with_suffix(".lock"), timeout=10)

    def __enter__(self) -> Path:
        self.lock.acquire()
        return self.path

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def add(verbs: Any, verb: Any) -> None:
    """The parsers of this module."""
    group = verbs.add_parser("keys", help="API keys: make, list and revoke")
    keys = group.add_subparsers(metavar="VERB", required=True)
    created = verb(keys, "create", create, "make a key and print it, once; it counts at once")
    created.add_argument("name")
    created.add_argument("role", choices=ROLES)
    verb(keys, "list", listed, "names and roles of all keys")
    verb(keys, "revoke", revoke, "take a key away; it stops counting at once").add_argument("name")
