"""`appliance keys`: API keys of this data folder's appliance, through its control, or in its file while it is down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from appliance.cli.terminal import say, say_json, table
from appliance.core.access import ROLES
from appliance.core.problems import Kind, Problem
from appliance.core.settings import Settings
from appliance.drivers.ownership import owner_of

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient
    from appliance.cli.key_check import PortCheck


def create(arguments: argparse.Namespace, settings: Settings) -> int:
    """Make a key and print it, as nothing can show it afterwards; then, on standard error, where it counts."""
    from appliance.cli.folder_control import control_of_folder
    from appliance.node.context import Node
    from appliance.operations import keys

    body = {"name": arguments.name, "role": arguments.role}
    control = control_of_folder(settings)
    if control:
        key = control.call("POST", "/keys", body)
        settings = as_they_listen(settings, **key.pop("listeners"))
    else:
        with owner_of(Path(settings.data_dir)):
            key = keys.create(Node.at(settings), body)
    if not arguments.json:
        say(key["key"])
    checked = check_where_possible(settings, control, key["key"])
    if arguments.json:
        say_json({**key, "counts_on": checked.good})
    refuse_wrong(checked, f'Key "{arguments.name}" was made, but does not count')
    print(f'Key "{arguments.name}": {outcome(settings, control, checked, "counts on")}', file=sys.stderr, flush=True)
    return 0


def list_keys(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli.folder_control import control_of_folder
    from appliance.drivers.keysfile import are_required
    from appliance.node.authentication import keys_path
    from appliance.node.context import Node
    from appliance.operations import keys

    control = control_of_folder(settings)
    entries = control.call("GET", "/keys") if control else keys.listed(Node.at(settings))
    if arguments.json:
        say_json(entries)
    elif entries:
        say(table(entries, ("name", "role", "from")))
    else:
        on = are_required(keys_path(settings))
        say("There is no key, and everybody is kept out" if on else "No key is asked for")
    return 0


def revoke(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli.folder_control import control_of_folder
    from appliance.node.context import Node
    from appliance.operations import keys

    control = control_of_folder(settings)
    if control:
        revoked = control.call("DELETE", f"/keys/{quote(arguments.name, safe='')}")
        settings = as_they_listen(settings, **revoked.pop("listeners"))
    else:
        with owner_of(Path(settings.data_dir)):
            revoked = keys.revoke(Node.at(settings), arguments.name)
    checked = check_where_possible(settings, control)
    if arguments.json:
        say_json({**revoked, "asked_on": checked.good})
    refuse_wrong(checked, f'Key "{arguments.name}" is revoked, but keys are not asked for')
    if not arguments.json:
        left = "" if revoked["left"] else ": no key is left, everybody is kept out"
        say(f'Key "{arguments.name}" is revoked{left}; {outcome(settings, control, checked, "keys are asked for on")}')
    return 0


def as_they_listen(settings: Settings, cert_file: str, require_client_cert: bool, **where: Any) -> Settings:
    """The settings with the listeners as they run, which the configuration may not say since it was changed."""
    tls = replace(settings.tls, cert_file=cert_file, require_client_cert=require_client_cert)
    return replace(settings, tls=tls, **where)


def check_where_possible(settings: Settings, control: ControlClient | None, key: str = "") -> PortCheck:
    """Whether the key counts or, without one, whether keys are asked for. Empty where no port can be checked."""
    from appliance.cli import key_check

    if control is None or not key_check.can_check(settings):
        return key_check.PortCheck([], {})
    return key_check.check_ports(settings, key)


def outcome(settings: Settings, control: ControlClient | None, checked: PortCheck, what: str) -> str:
    if control is None:
        return f"nothing runs in {settings.data_dir} now, its keys.toml counts from the next start"
    if not checked.good:
        return "not tried, as a client certificate is needed and TEI_APPLIANCE_CERT names none"
    return f"{what} {port_list(checked.good)}"


def refuse_wrong(checked: PortCheck, what: str) -> None:
    """Raises: Problem when a port is not as it should be."""
    if checked.wrong:
        reasons = "; ".join(f"{port}: {fault}" for port, fault in checked.wrong.items())
        raise Problem(Kind.INTERNAL, "KEY_DOES_NOT_COUNT", f"{what} on {port_list(checked.wrong)} ({reasons})")


def port_list(ports: Iterable[int]) -> str:
    return ", ".join(map(str, ports))


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    group = verbs.add_parser("keys", help="API keys: make, list and revoke")
    keys = group.add_subparsers(metavar="VERB", required=True)
    created = add_command(keys, "create", create, "make a key and print it, once; it counts at once")
    created.add_argument("name")
    created.add_argument("role", choices=ROLES)
    add_command(keys, "list", list_keys, "names and roles of all keys")
    add_command(keys, "revoke", revoke, "take a key away; it stops counting at once").add_argument("name")
