"""Reading the command line and running its command. Exit status 0, 1 when something failed, 2 for wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.cli import (
    appliance_commands,
    cache,
    cluster,
    completion,
    export,
    inference,
    instances,
    keys,
    looking,
    models,
    run,
)
from appliance.cli.command import Command
from appliance.core.problems import Problem
from appliance.drivers import configfile

SHELLS = ("bash", "zsh", "tcsh")
SETTING_FLAGS = ("api_port", "grpc_port", "http_port", "bind", "data_dir")


class PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *parsed: Any) -> None:
        print(completion.script(parser, parsed[1]))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="appliance", description="Many embedding models on one machine.")
    top.add_argument(
        "-c",
        "--config",
        help="configuration file; default: $TEI_MANAGER_CONFIG, then that of the service in /etc/tei-appliance",
    )
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a completion script for this shell",
    )
    top.add_argument("--version", action="version", version=f"tei-appliance {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="machine-readable output")
    verbs = top.add_subparsers(metavar="VERB", required=True)

    def add_command(parent: Any, name: str, run: Command, help: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = parent.add_parser(name, parents=[shared], help=help, description=help)
        added.set_defaults(run=run)
        return added

    for module in (appliance_commands, cluster, run, instances, export, looking, models, inference, cache, keys):
        module.add_parsers(verbs, add_command)
    return top


def bench_client() -> int:
    """`bench-client`, by which name other managers' users know `appliance bench`."""
    return main(["bench", *sys.argv[1:]])


def main(command_line: Sequence[str] | None = None, root: Path = configfile.ROOT) -> int:
    """root: of the file system in which the service's configuration and data folder are looked for."""
    parsed = parser().parse_args(command_line)
    if config := configfile.chosen(parsed.config, os.environ, root):
        os.environ[configfile.CONFIG_VARIABLE] = os.path.abspath(config)
    try:
        flags = {key: getattr(parsed, key, None) for key in SETTING_FLAGS}
        parsed.settings = configfile.load(os.environ, flags, root)
        status: int = parsed.run(parsed, parsed.settings)
        return status
    except Problem as problem:
        print(f"appliance: {problem.message}", file=sys.stderr)
        if problem.code == "UNAUTHENTICATED":
            print("appliance: the command line takes your key from TEI_APPLIANCE_KEY", file=sys.stderr)
        return 1
    except OSError as error:  # `appliance ... | head`, or a full disk
        if not isinstance(error, BrokenPipeError):
            print(f"appliance: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UnicodeEncodeError as error:
        if not any("\ud800" <= letter <= "\udfff" for letter in error.object[error.start : error.end]):
            raise  # else the shell has handed on bytes that are no text
        print(f"appliance: an argument is no UTF-8: {error.object[error.start : error.end]!a}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
