"""`appliance instances`: list, create and drive them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from appliance.cli.command import with_control
from appliance.cli.terminal import (
    clear_progress_bar,
    coloured,
    duration,
    job_progress_bar,
    readable,
    say,
    say_all,
    say_json,
    table,
)
from appliance.core.generations import STRATEGIES
from appliance.core.instance import CHECKS
from appliance.core.problems import Kind, Problem, invalid

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient

INSTANCE_COLUMNS = (
    "name",
    "status",
    "replicas_ready",
    "replicas",
    "port",
    "pid",
    "up",
    "loads",
    "restarts",
    "generation",
    "model_id",
)
POLL_SECS = 0.3
ON_THE_WAY = ("downloading", "starting", "stopping")
FIELD_NAMES = ", ".join(name for name in CHECKS if name not in ("name", "model_id"))


def show(arguments: argparse.Namespace, instances: list[dict[str, Any]] | dict[str, Any]) -> None:
    """As JSON a list or a single object, as the API answered; else as a table."""
    if arguments.json:
        say_json(instances)
    else:
        say(instance_table(instances if isinstance(instances, list) else [instances]))


def instance_table(instances: list[dict[str, Any]]) -> str:
    """up: since when it runs; loads: how long it took to load, so long it takes to wake."""
    rows = [{**each, "up": duration(each["uptime_secs"]), "loads": duration(each["load_secs"])} for each in instances]
    return table(rows, INSTANCE_COLUMNS)


@with_control
def list_instances(arguments: argparse.Namespace, control: ControlClient) -> int:
    listed = control.instances()
    if arguments.names:
        say_all(each["name"] for each in listed)
    else:
        show(arguments, listed)
    return 0


@with_control
def create(arguments: argparse.Namespace, control: ControlClient) -> int:
    fields = {"name": arguments.name, "model_id": arguments.model_id, **dict(map(parse_field, arguments.set or []))}
    instance = control.create(fields, dry_run=arguments.dry_run)
    if arguments.wait and not arguments.dry_run:
        instance = wait_while_starting(control, arguments.name)
    show(arguments, instance)
    return 1 if instance["status"] in ("failed", "stopped") else 0  # stopped: by somebody, meanwhile


@with_control
def change(arguments: argparse.Namespace, control: ControlClient) -> int:
    fields = dict(map(parse_field, arguments.fields))
    flags = {"dry_run": arguments.dry_run, "allow_incompatible": arguments.allow_incompatible}
    query = {flag: "true" for flag, chosen in flags.items() if chosen} | strategy_of(arguments)
    instance = control.change(arguments.name, fields, **query)
    if arguments.dry_run:
        show(arguments, instance)
        say_plan(arguments, instance)
        return 0
    return shown_afterwards(arguments, control, instance)


def strategy_of(arguments: argparse.Namespace) -> dict[str, str]:
    return {"strategy": arguments.strategy} if arguments.strategy else {}


def shown_afterwards(arguments: argparse.Namespace, control: ControlClient, instance: dict[str, Any]) -> int:
    """The instance, with --wait as it is when all is done. 1 where it has failed, or did not become what was asked."""
    replacement = instance["replacement"]
    if arguments.wait:
        instance = wait_while_starting(control, arguments.name)
    show(arguments, instance)
    say_plan(arguments, instance)
    fell_back = arguments.wait and replacement and instance["generation"] < replacement["generation"]
    if fell_back:
        say(coloured(readable(instance["last_error"])))
    return 1 if fell_back or instance["status"] == "failed" else 0


def say_plan(arguments: argparse.Namespace, instance: dict[str, Any]) -> None:
    """What starts beside an instance, or would take its place; nothing behind JSON, which has it."""
    if (plan := instance["replacement"]) and not arguments.json:
        needs = ", ".join(f"{size // 1024**2} MiB of {place}" for place, size in plan["needs"].items())
        changes = ", ".join(plan["changes"])
        say(f"generation {plan['generation']}, {readable(plan['strategy'])}: {changes}; it takes some {needs}")


def parse_field(text: str) -> tuple[str, Any]:
    """`key=value`, where the value is JSON if it reads as JSON, else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise invalid(f'A field is given as key=value, not "{text}"')
    is_text = key in CHECKS and CHECKS[key].schema.get("type") == "string"  # a revision may be 1.0
    try:
        return key, value if is_text and not value.startswith('"') and value != "null" else json.loads(value)
    except ValueError:
        return key, value


def wait_while_starting(control: ControlClient, name: str) -> dict[str, Any]:
    """The instance as it is afterwards."""
    began = time.monotonic()
    while is_on_the_way(instance := control.instance(name)):
        if instance["status"] == "downloading":
            job_progress_bar(instance["progress"] or {})
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{what_loads(instance)}: {time.monotonic() - began:.0f} s")
        time.sleep(POLL_SECS)
    clear_progress_bar()
    return instance


def is_on_the_way(instance: dict[str, Any]) -> bool:
    return bool(instance["status"] in ON_THE_WAY or instance["rolling"] or instance["replacement"])


def what_loads(instance: dict[str, Any]) -> str:
    name, replacement = instance["name"], instance["replacement"]
    if not replacement:
        return f"{name} is loading its model"
    ready = f"{replacement['replicas_ready']} replicas ready"
    return f"{name} answers, and generation {replacement['generation']} is loading beside it ({ready})"


@with_control
def show_instance(arguments: argparse.Namespace, control: ControlClient) -> int:
    instance = control.instance(arguments.name)
    say(json.dumps(instance, indent=2) if arguments.json else "\n".join(details(instance)))
    return 0


def details(instance: dict[str, Any]) -> Iterator[str]:
    """One line for each field, and one for each replica."""
    wide = max(map(len, instance))
    for key, value in instance.items():
        if key == "uptime_secs":
            value = duration(value)
        if key != "replica_list":
            yield f"{key:<{wide}}  {coloured(readable(value))}"
    for replica in instance["replica_list"]:
        known = {name: each for name, each in replica.items() if name != "index" and each is not None}
        yield f"{'replica ' + str(replica['index']):<{wide}}  {readable(known)}"


@with_control
def start_or_stop(arguments: argparse.Namespace, control: ControlClient) -> int:
    query = ({"rolling": "false"} if arguments.at_once else {}) | strategy_of(arguments)
    instance = control.instance(arguments.name, arguments.verb, "POST", **query)
    return shown_afterwards(arguments, control, instance)


@with_control
def delete(arguments: argparse.Namespace, control: ControlClient) -> int:
    show(arguments, control.instance(arguments.name, method="DELETE"))
    return 0


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    group = verbs.add_parser("instances", help="list, create and drive instances")
    instances = group.add_subparsers(metavar="VERB", required=True)
    listed = add_command(instances, "list", list_instances, "all instances")
    listed.add_argument("--names", action="store_true", help="only their names, one a line")
    created = add_command(instances, "create", create, "create an instance and start it")
    created.add_argument("name")
    created.add_argument("model_id")
    created.add_argument("--set", action="append", metavar="FIELD=VALUE", help=f"any other field: {FIELD_NAMES}")
    created.add_argument("--wait", action="store_true", help="until it answers or has failed")
    created.add_argument("--dry-run", action="store_true", help="say what would be, and create nothing")
    add_command(instances, "show", show_instance, "everything about one instance").add_argument("name")
    for name in ("start", "stop", "restart", "undo", "sleep", "wake"):
        driven = add_command(instances, name, start_or_stop, f"{name} an instance")
        driven.add_argument("name")
        driven.set_defaults(verb=name, at_once=False, strategy=None, wait=False)
        if name == "restart":
            driven.add_argument("--at-once", action="store_true", help="all replicas together, not one after the other")
        if name == "undo":
            add_strategy(driven)
        if name not in ("stop", "sleep"):
            driven.add_argument("--wait", action="store_true", help="until it answers or has failed")
    changed = add_command(instances, "set", change, "give fields of an instance other values")
    changed.add_argument("name")
    changed.add_argument("fields", nargs="+", metavar="FIELD=VALUE", help=f"model_id, {FIELD_NAMES}")
    changed.add_argument("--wait", action="store_true", help="until it answers or has failed")
    changed.add_argument(
        "--allow-incompatible", action="store_true", help="also where its vectors become others than those so far"
    )
    changed.add_argument("--dry-run", action="store_true", help="say what would be, and change nothing")
    add_strategy(changed)
    add_command(instances, "delete", delete, "stop an instance and forget it").add_argument("name")


def add_strategy(parser: argparse.ArgumentParser) -> None:
    words = "start new processes beside the old ones, or end those first; by default beside, where there is room"
    parser.add_argument("--strategy", choices=STRATEGIES, help=words)


def named_or_only(control: ControlClient, name: str | None) -> str:
    """The instance of this name, or the only one there is. Raises: Problem."""
    if name:
        return name
    try:
        names = [instance["name"] for instance in control.instances()]
    except Problem as problem:
        if problem.code != "FORBIDDEN":
            raise
        words = "This key may not list the instances: name one with --instance"
        raise Problem(Kind.FORBIDDEN, "FORBIDDEN", words) from None
    if len(names) != 1:
        there = ", ".join(names) or "there is none; create one first"
        raise Problem(Kind.INVALID, "VALIDATION_ERROR", f"Choose one with --instance: {there}")
    return names[0]
