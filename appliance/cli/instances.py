"""`appliance instances`: list, create and drive them; `appliance export`: all of them as configuration."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import tomli_w

from appliance.cli.client import Control, remote
from appliance.cli.terminal import say, say_json, table
from appliance.core.instance import CHECKS
from appliance.core.problems import Kind, Problem, invalid

COLUMNS = ("name", "status", "replicas_ready", "replicas", "port", "pid", "uptime_secs", "restarts", "model_id")
POLL_SECS = 0.3


def show(given: argparse.Namespace, found: Any) -> None:
    if given.json:
        say_json(found)
    else:
        say(table(found if isinstance(found, list) else [found], COLUMNS))


@remote
def listed(given: argparse.Namespace, control: Control) -> int:
    show(given, control.instances())
    return 0


@remote
def create(given: argparse.Namespace, control: Control) -> int:
    fields = {"name": given.name, "model_id": given.model_id, **dict(map(field, given.set or []))}
    found = control.create(fields, dry_run=given.dry_run)
    if given.wait and not given.dry_run:
        found = settled(control, given.name)
    show(given, found)
    return 1 if found["status"] == "failed" else 0


def field(text: str) -> tuple[str, Any]:
    """`key=value`, where the value is JSON if it reads as JSON, else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise invalid(f'--set takes key=value, not "{text}"')
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def settled(control: Control, name: str) -> dict[str, Any]:
    """The instance when it is no longer starting."""
    began = time.monotonic()
    while (found := control.instance(name))["status"] == "starting":
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{name} is loading its model: {time.monotonic() - began:.0f} s")
        time.sleep(POLL_SECS)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return found


@remote
def one(given: argparse.Namespace, control: Control) -> int:
    found = control.instance(given.name)
    say(json.dumps(found, indent=2) if given.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    return 0


@remote
def drive(given: argparse.Namespace, control: Control) -> int:
    found = control.instance(given.name, given.verb, "POST")
    if given.verb != "stop" and given.wait:
        found = settled(control, given.name)
    show(given, found)
    return 1 if found["status"] == "failed" else 0


@remote
def delete(given: argparse.Namespace, control: Control) -> int:
    show(given, control.instance(given.name, method="DELETE"))
    return 0


@remote
def log_lines(given: argparse.Namespace, control: Control) -> int:
    lines = control.logs(given.name, given.replica, -given.lines)
    say(json.dumps(lines) if given.json else "\n".join(lines))
    return 0


@remote
def export(given: argparse.Namespace, control: Control) -> int:
    """Every instance as `[[instances]]` of a configuration file, or as JSON."""
    kept = [{key: each[key] for key in CHECKS if each[key] not in (None, [])} for each in control.instances()]
    if given.json:
        say_json(kept)
    else:
        say(tomli_w.dumps({"instances": kept}).rstrip())
    return 0


def add(verbs: Any, verb: Any) -> None:
    """The parsers of this module."""
    group = verbs.add_parser("instances", help="list, create and drive instances")
    instances = group.add_subparsers(metavar="VERB", required=True)
    verb(instances, "list", listed, "all instances")
    created = verb(instances, "create", create, "create an instance and start it")
    created.add_argument("name")
    created.add_argument("model_id")
    created.add_argument("--set", action="append", metavar="FIELD=VALUE", help="any other field, e.g. replicas=2")
    created.add_argument("--wait", action="store_true", help="until it answers or has failed")
    created.add_argument("--dry-run", action="store_true", help="say what would be, and create nothing")
    verb(instances, "show", one, "everything about one instance").add_argument("name")
    for name in ("start", "stop", "restart"):
        driven = verb(instances, name, drive, f"{name} an instance")
        driven.add_argument("name")
        driven.set_defaults(verb=name)
        if name != "stop":
            driven.add_argument("--wait", action="store_true", help="until it answers or has failed")
    verb(instances, "delete", delete, "stop an instance and forget it").add_argument("name")
    logged = verb(instances, "logs", log_lines, "the last lines of a replica's log")
    logged.add_argument("name")
    logged.add_argument("--replica", type=int, default=0)
    logged.add_argument("--lines", type=int, default=100)
    verb(verbs, "export", export, "print all instances as [[instances]] of a configuration file")


def only(control: Control, wanted: str | None) -> str:
    """The instance that was named, or the only one there is. Raises: Problem."""
    if wanted:
        return wanted
    names = [found["name"] for found in control.instances()]
    if len(names) != 1:
        there = ", ".join(names) or "there is none; create one first"
        raise Problem(Kind.INVALID, "VALIDATION_ERROR", f"Choose one with --instance: {there}")
    return names[0]
