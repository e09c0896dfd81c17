"""The commands about the appliance as a whole: `appliance up`, `down`, `status`, `doctor` and `version`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.cli import top
from appliance.cli.instances import instance_table
from appliance.cli.terminal import coloured, say, say_json
from appliance.cli.top import Snapshot
from appliance.core.problems import invalid
from appliance.core.settings import Settings
from appliance.drivers.configfile import SERVICE_DATA_DIR

WATCH_SECS = 2.0


def up(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli.up import bring_up
    from appliance.node.context import Node

    refuse_root_for_the_service(Path(settings.data_dir))
    return bring_up(Node.at(settings), os.environ, say)


def refuse_root_for_the_service(folder: Path) -> None:
    """Root's command line finds the service's folder by itself. The service could not use what root creates there."""
    if os.geteuid() or not folder.as_posix().endswith(f"/{SERVICE_DATA_DIR}") or not folder.exists():
        return
    if owner := folder.stat().st_uid:
        raise invalid(
            f"{folder} belongs to user {owner}, and not to root: start the service (systemctl start tei-appliance), or "
            "name another data folder (--data-dir) or configuration (--config)"
        )


def down(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli.ending import bring_down
    from appliance.node.context import Node

    return bring_down(Node.at(settings), say)


def status(arguments: argparse.Namespace, settings: Settings) -> int:
    """With --watch again and again until Ctrl-C. --ready is for probes, which have no key."""
    from appliance.cli.control_client import ControlClient

    if arguments.ready:
        answer = ControlClient.nearest(settings).call("GET", "/ready")  # raises unless it is
        say(json.dumps(answer) if arguments.json else answer["status"])
        return 0
    control = ControlClient.from_settings(settings)
    before: Snapshot | None = None
    while True:
        health = control.call("GET", "/health")
        instances = control.instances()
        if arguments.json:
            say_json({**health, "instances": instances})
        elif arguments.watch:
            now = Snapshot.at_page(control.metrics(), time.monotonic())
            shown = top.table_of(instances, control.events(0), before or now, now)
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[2J")
            say_status(health, instances, shown)
            before = now
        else:
            say_status(health, instances, instance_table(instances))
        if not arguments.watch:
            return 0 if health["status"] == "healthy" else 1
        time.sleep(WATCH_SECS)


def say_status(health: dict[str, Any], instances: list[dict[str, Any]], shown: str) -> None:
    running, total = health["instances"]["running"], health["instances"]["total"]
    say(f"{coloured(health['status'])}: {running} of {total} instances running, version {health['version']}")
    if "reason" in health:
        say(f"  {health['reason']}")
    if instances:
        say(shown)
    for instance in instances:
        if instance["last_error"]:
            say(f"{instance['name']}: {instance['last_error']}")


def run_doctor(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.node import doctor
    from appliance.node.context import Node

    findings = doctor.examine(Node.at(settings))
    if arguments.json:
        say_json([finding.mapping() for finding in findings])
    else:
        for finding in findings:
            say(f"{coloured(finding.verdict, 8)} {finding.what}: {finding.state}")
            if finding.fix:
                say(f"         {finding.fix}")
    return 1 if any(finding.verdict == "wrong" for finding in findings) else 0


def version(arguments: argparse.Namespace, settings: Settings) -> int:
    say(json.dumps({"version": __version__}) if arguments.json else f"tei-appliance {__version__}")
    return 0


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    started = add_command(verbs, "up", up, "run the whole appliance in the foreground")
    for flag in ("api-port", "grpc-port", "http-port"):
        started.add_argument(f"--{flag}", type=int)
    started.add_argument("--bind", help="address to listen on")
    started.add_argument("--data-dir", help="folder for state, logs and sockets")
    add_command(verbs, "down", down, "stop the appliance")
    watched = add_command(verbs, "status", status, "what runs, and how well")
    watched.add_argument("--ready", action="store_true", help="only whether the appliance itself works; for probes")
    watched.add_argument("--watch", action="store_true", help="again and again, with rates, until Ctrl-C")
    add_command(
        verbs, "doctor", run_doctor, "examine this machine and the appliance, and say how to mend what is wrong"
    )
    add_command(verbs, "version", version, "print the version")
