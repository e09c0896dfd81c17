"""`appliance keys`: API keys of this data folder's appliance, through its control, or in its file where it is down."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.cli import counting
from appliance.cli.client import Control
from appliance.cli.counting import Tried
from appliance.cli.reaching import running
from appliance.cli.terminal import say, say_json, table
from appliance.core.access import ROLES
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers.ownership import owner_of
from appliance.node.authentication import keys_path
from appliance.node.context import Node
from appliance.operations import keys


def create(given: argparse.Namespace, settings: Settings) -> int:
    """Make a key and print it: nobody can find it out afterwards. On standard error, where it counts."""
    body = {"name": given.name, "role": given.role}
    control = running(settings)
    if control:
        made = control.call("POST", "/keys", body)
        settings = replace(settings, **made.pop("listeners"))  # the running ones, whatever this command line was told
    else:
        with owner_of(Path(settings.data_dir)):
            made = keys.create(Node.at(settings), body)
    if not given.json:
        say(made["key"])
    found = tried(settings, control, made["key"])
    if given.json:
        say_json({**made, "counts_on": found.good})
    refuse_if(found, f'Key "{given.name}" was made, but does not count')
    print(f'Key "{given.name}": {outcome(settings, control, found, "counts on")}', file=sys.stderr, flush=True)
    return 0


def listed(given: argparse.Namespace, settings: Settings) -> int:
    control = running(settings)
    found = control.call("GET", "/keys") if control else keys.listed(Node.at(settings))
    if given.json:
        say_json(found)
    elif found:
        say(table(found, ("name", "role", "from")))
    else:
        on = os.path.exists(keys_path(settings))
        say("There is no key, and everybody is kept out" if on else "No key is asked for")
    return 0


def revoke(given: argparse.Namespace, settings: Settings) -> int:
    control = running(settings)
    if control:
        revoked = control.call("DELETE", f"/keys/{quote(given.name, safe='')}")
        settings = replace(settings, **revoked.pop("listeners"))
    else:
        with owner_of(Path(settings.data_dir)):
            revoked = keys.revoke(Node.at(settings), given.name)
    found = tried(settings, control)
    if given.json:
        say_json({**revoked, "asked_on": found.good})
    refuse_if(found, f'Key "{given.name}" is revoked, but keys are not asked for')
    if not given.json:
        left = "" if revoked["left"] else ": no key is left, everybody is kept out"
        say(f'Key "{given.name}" is revoked{left}; {outcome(settings, control, found, "keys are asked for on")}')
    return 0


def tried(settings: Settings, control: Control | None, key: str = "") -> Tried:
    """Whether the key counts, or without one, whether keys are asked for, where anybody runs who could be asked."""
    if control is None or not counting.can_be_asked(settings):
        return Tried([], {})
    return counting.tried(settings, key)


def outcome(settings: Settings, control: Control | None, found: Tried, what: str) -> str:
    if control is None:
        return f"nothing runs in {settings.data_dir} now, its keys.toml counts from the next start"
    if not found.good:
        return "not tried, as a client certificate is needed and TEI_APPLIANCE_CERT names none"
    return f"{what} {listing(found.good)}"


def refuse_if(found: Tried, what: str) -> None:
    if found.wrong:
        reasons = "; ".join(f"{port}: {why}" for port, why in found.wrong.items())
        raise Problem(Kind.INTERNAL, "KEY_DOES_NOT_COUNT", f"{what} on {listing(found.wrong)} ({reasons})")


def listing(found: Iterable[int]) -> str:
    return ", ".join(map(str, found))


def add(verbs: Any, verb: Any) -> None:
    """The parsers of this module."""
    group = verbs.add_parser("keys", help="API keys: make, list and revoke")
    keys = group.add_subparsers(metavar="VERB", required=True)
    created = verb(keys, "create", create, "make a key and print it, once; it counts at once")
    created.add_argument("name")
    created.add_argument("role", choices=ROLES)
    verb(keys, "list", listed, "names and roles of all keys")
    verb(keys, "revoke", revoke, "take a key away; it stops counting at once").add_argument("name")
