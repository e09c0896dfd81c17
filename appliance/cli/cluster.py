"""`appliance cluster`: this machine as the head or as a node of a cluster of Ray Serve."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from appliance.cli import appliance_commands
from appliance.cli.terminal import say, say_json, table
from appliance.core.listing import dump
from appliance.core.problems import invalid
from appliance.core.settings import ENVIRONMENT, Settings
from appliance.drivers import configfile
from appliance.node.directory import read_listing

VARIABLES = {name: variable for variable, name in ENVIRONMENT.items()}


def up(arguments: argparse.Namespace, settings: Settings) -> int:
    """`appliance up` as the head."""
    return run_as(arguments, settings, ray_role="head", ray_address=arguments.address or settings.ray_address)


def join(arguments: argparse.Namespace, settings: Settings) -> int:
    """`appliance up` as a node."""
    address = arguments.address or settings.ray_address
    return run_as(arguments, settings, ray_role="node", ray_head=arguments.head, ray_address=address)


def run_as(arguments: argparse.Namespace, settings: Settings, **asked: str) -> int:
    """What was asked for on the command line counts more than the file, also for the programs of the appliance."""
    if find_spec("ray") is None:
        raise invalid("Ray is not installed: pip install '.[ray]' in the source of the appliance")
    os.environ.update({VARIABLES[name]: value for name, value in asked.items() if value})
    flags = {name: getattr(settings, name) for name in ("api_port", "grpc_port", "http_port", "bind", "data_dir")}
    return appliance_commands.up(arguments, configfile.load(os.environ, flags))


def status(arguments: argparse.Namespace, settings: Settings) -> int:
    """The instances of the cluster, and where their replicas are, as this machine knows it."""
    path = Path(settings.layout.listing)
    if not path.exists():
        raise invalid(f"{path} is not there: this appliance is in no cluster, or has not found its head yet")
    listing = read_listing(path)
    if arguments.json:
        say_json(dump(listing)["instances"])
        return 0
    rows = [
        {
            "name": each.name,
            "without_replicas": each.arrival or None,
            "replicas": len(each.addresses),
            "model_id": each.spec.model_id,
            "addresses": " ".join(map(str, each.addresses)) or None,
        }
        for each in listing
    ]
    say(table(rows, ("name", "replicas", "without_replicas", "model_id", "addresses")))
    return 0


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    parser = verbs.add_parser("cluster", help="several machines under Ray Serve", description=__doc__)
    actions = parser.add_subparsers(metavar="VERB", required=True)
    begun = add_command(actions, "up", up, "run the appliance in the foreground, as the head of a cluster")
    joined = add_command(actions, "join", join, "run the appliance in the foreground, as a node of a cluster")
    joined.add_argument("head", help="address of the head")
    for each in (begun, joined):
        each.add_argument("--engine", choices=("ray",), default="ray", help="what places the replicas; %(default)s")
        each.add_argument("--address", default="", help="of this machine, at which the others reach it")
        each.add_argument("--data-dir", help="folder for state, logs and sockets")
    add_command(actions, "status", status, "the instances of the cluster, and where their replicas are")
    add_command(actions, "down", appliance_commands.down, "stop the appliance of this machine; it leaves the cluster")
