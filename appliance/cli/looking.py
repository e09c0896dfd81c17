"""`appliance logs`, `events`, `gpus`: what the box says, once or as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from appliance.cli.command import with_control
from appliance.cli.terminal import say, say_json, size, table
from appliance.core.log_lines import unwrapped

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient

FOLLOW_SECS = 0.5
LAST_EVENTS = 20
NO_LINE = 10**12  # beyond every log


@with_control
def logs(arguments: argparse.Namespace, control: ControlClient) -> int:
    """The last lines of a replica's log, and with --follow those that come; on a terminal JSON lines are words."""
    known = say_lines(arguments, control, -arguments.lines or NO_LINE)
    while arguments.follow:
        time.sleep(FOLLOW_SECS)
        known = say_lines(arguments, control, known)
    return 0


def say_lines(arguments: argparse.Namespace, control: ControlClient, start: int) -> int:
    """Print the lines from number ``start`` on; returns how many the log has by then."""
    window = control.log_window(arguments.name, arguments.replica, start)
    if NO_LINE > start > window["total_lines"]:  # the oldest part was rotated away: it goes on with what comes
        return int(window["total_lines"])
    if arguments.json:
        if window["lines"] or not arguments.follow:
            say(json.dumps(window["lines"]))
    else:
        for line in window["lines"]:
            say(unwrapped(line) if sys.stdout.isatty() else line)
    total: int = window["total_lines"]
    return total


@with_control
def events(arguments: argparse.Namespace, control: ControlClient) -> int:
    """The last events, and with --follow those that come."""
    told = control.events(0)
    last = told[-1]["seq"] if told else 0
    say_events(arguments, told[-arguments.lines :] if arguments.lines else [])
    while arguments.follow:
        time.sleep(FOLLOW_SECS)
        if fresh := control.events(last):
            last = fresh[-1]["seq"]
            say_events(arguments, fresh)
    return 0


def say_events(arguments: argparse.Namespace, told: list[dict[str, Any]]) -> None:
    for event in told:
        say(json.dumps(event) if arguments.json else event_line(event))


def event_line(event: dict[str, Any]) -> str:
    at = datetime.fromisoformat(event["time"]).astimezone()
    message = str(event["message"]).partition("\n")[0]
    return f"{at:%Y-%m-%d %H:%M:%S}  {event['event']:<16} {message}"


@with_control
def gpus(arguments: argparse.Namespace, control: ControlClient) -> int:
    """The GPUs, their memory, and our replicas on them."""
    told = control.gpus()
    if arguments.json:
        say_json(told)
    elif not told:
        say("No GPU: no NVIDIA driver answers here. Models run on the CPU")
    else:
        say(table([gpu_row(gpu) for gpu in told], ("index", "name", "used", "total", "busy", "replicas")))
    return 0


def gpu_row(gpu: dict[str, Any]) -> dict[str, Any]:
    busy = gpu["utilization"]
    replicas = [f"{each['instance']}-{each['replica']}" for each in gpu["replicas"]]
    return {
        "index": gpu["index"],
        "name": gpu["name"],
        "used": size(gpu["memory_used"]),
        "total": size(gpu["memory_total"]),
        "busy": None if busy is None else f"{busy:.0%}",
        "replicas": ", ".join(replicas) or None,
    }


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    logged = add_command(verbs, "logs", logs, "the last lines of a replica's log")
    logged.add_argument("name")
    logged.add_argument("--replica", type=int, default=0)
    logged.add_argument("--lines", type=count, default=100)
    told = add_command(verbs, "events", events, "what happened: starts, deaths, downloads, repairs")
    told.add_argument("--lines", type=count, default=LAST_EVENTS, help="how many of the last ones")
    for followed in (logged, told):
        followed.add_argument("-f", "--follow", action="store_true", help="and those that come, until Ctrl-C")
    add_command(verbs, "gpus", gpus, "the GPUs and the replicas on them")
