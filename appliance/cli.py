"""`appliance`: the command line. Exit status 0, 1 when something failed, 2 for wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from appliance import __version__, launch
from appliance.box import Appliance
from appliance.client import Control, Multiplexer
from appliance.core.problems import Problem, invalid
from appliance.core.settings import Settings, address
from appliance.drivers import configfile
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

COLUMNS = ("name", "status", "replicas_ready", "replicas", "port", "pid", "uptime_secs", "restarts", "model_id")
Verb = Callable[[argparse.Namespace, Settings], int]


def say(line: str) -> None:
    print(line, flush=True)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text; absent values as a dash."""
    cells = [[name.upper() for name in columns]]
    cells += [["-" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def control(settings: Settings) -> Control:
    return Control(f"http://{address(settings.bind, settings.api_port)}")


def show(given: argparse.Namespace, found: Any, columns: Sequence[str] = COLUMNS) -> None:
    if given.json:
        say(json.dumps(found, indent=2))
    else:
        say(table(found if isinstance(found, list) else [found], columns))


def up(given: argparse.Namespace, settings: Settings) -> int:
    return launch.up(Appliance.at(settings), os.environ, say)


def down(given: argparse.Namespace, settings: Settings) -> int:
    return launch.down(Appliance.at(settings), say)


def status(given: argparse.Namespace, settings: Settings) -> int:
    health = control(settings).call("GET", "/health")
    instances = control(settings).instances()
    if given.json:
        say(json.dumps({**health, "instances": instances}, indent=2))
    else:
        running, total = health["instances"]["running"], health["instances"]["total"]
        say(f"{health['status']}: {running} of {total} instances running, version {health['version']}")
        if instances:
            say(table(instances, COLUMNS))
    return 0 if health["status"] == "healthy" else 1


def instances_list(given: argparse.Namespace, settings: Settings) -> int:
    show(given, control(settings).instances())
    return 0


def instances_create(given: argparse.Namespace, settings: Settings) -> int:
    fields = {"name": given.name, "model_id": given.model_id, **dict(map(field, given.set or []))}
    show(given, control(settings).create(fields))
    return 0


def field(text: str) -> tuple[str, Any]:
    """`key=value`, where the value is JSON if it reads as JSON, else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise invalid(f'--set takes key=value, not "{text}"')
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def instances_show(given: argparse.Namespace, settings: Settings) -> int:
    found = control(settings).instance(given.name)
    say(json.dumps(found, indent=2) if given.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    return 0


def instances_verb(given: argparse.Namespace, settings: Settings) -> int:
    show(given, control(settings).instance(given.name, given.verb, "POST"))
    return 0


def instances_delete(given: argparse.Namespace, settings: Settings) -> int:
    show(given, control(settings).instance(given.name, method="DELETE"))
    return 0


def instances_logs(given: argparse.Namespace, settings: Settings) -> int:
    lines = control(settings).logs(given.name, given.replica, -given.lines)
    say(json.dumps(lines) if given.json else "\n".join(lines))
    return 0


def embed(given: argparse.Namespace, settings: Settings) -> int:
    instance = given.instance
    if instance is None:
        names = [found["name"] for found in control(settings).instances()]
        if len(names) != 1:
            raise invalid(f"Choose one with --instance: {', '.join(names) or 'there is none; create one first'}")
        instance = names[0]
    endpoint = address(settings.bind, settings.grpc_port)
    vector = Multiplexer(endpoint).embed(given.text, Target(instance_name=instance))
    say(json.dumps(vector))
    return 0


def bench(given: argparse.Namespace, settings: Settings) -> int:
    from appliance import bench as measure  # it imports pyarrow, which no other verb needs

    options = measure.Options(
        endpoint=given.endpoint or address(settings.bind, settings.grpc_port),
        **{key: getattr(given, key) for key in measure.Options.__dataclass_fields__ if key != "endpoint"},
    )
    found, samples = measure.run(options, measure.bar)
    say(json.dumps(asdict(found), indent=2) if given.json else "\n".join(measure.lines(found)))
    if given.plot:
        measure.plot(found, samples, given.plot)
    return 1 if found.failed else 0


def version(given: argparse.Namespace, settings: Settings) -> int:
    say(json.dumps({"version": __version__}) if given.json else f"tei-appliance {__version__}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="appliance", description="Many embedding models on one machine.")
    top.add_argument("--config", help="configuration file (appliance.toml)")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="machine-readable output")
    verbs = top.add_subparsers(metavar="VERB", required=True)

    def verb(parent: Any, name: str, run: Verb, help: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = parent.add_parser(name, parents=[shared], help=help, description=help)
        added.set_defaults(run=run)
        return added

    started = verb(verbs, "up", up, "run the whole appliance in the foreground")
    for flag in ("api-port", "grpc-port", "http-port"):
        started.add_argument(f"--{flag}", type=int)
    started.add_argument("--bind", help="address to listen on")
    started.add_argument("--data-dir", help="folder for state, logs and sockets")
    verb(verbs, "down", down, "stop the appliance")
    verb(verbs, "status", status, "what runs, and how well")
    embedded = verb(verbs, "embed", embed, "print the vector of a text")
    embedded.add_argument("text")
    embedded.add_argument("--instance", help="instance name; not needed while there is only one")
    measured = verb(verbs, "bench", bench, "measure how fast an instance answers")
    measured.add_argument("-e", "--endpoint", help="host:port; default: the multiplexer of this configuration")
    measured.add_argument("-i", "--instance", required=True)
    measured.add_argument("--mode", choices=("standard", "stream", "arrow"), default="standard")
    measured.add_argument("-n", "--num-texts", type=int, default=1000)
    measured.add_argument("-b", "--batch-size", type=int, default=100, help="texts of one stream or Arrow batch")
    measured.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    measured.add_argument("--texts", help="file with one text a line")
    measured.add_argument("--noop", action="store_true", help="arrow only: answered without any instance")
    for flag in ("cert", "key", "ca"):
        measured.add_argument(f"--{flag}", help="PEM file")
    measured.add_argument("--plot", metavar="FILE.png", help="draw throughput and latency")
    verb(verbs, "version", version, "print the version")

    group = verbs.add_parser("instances", help="list, create and drive instances")
    instances = group.add_subparsers(metavar="VERB", required=True)
    verb(instances, "list", instances_list, "all instances")
    created = verb(instances, "create", instances_create, "create an instance and start it")
    created.add_argument("name")
    created.add_argument("model_id")
    created.add_argument("--set", action="append", metavar="FIELD=VALUE", help="any other field, e.g. replicas=2")
    verb(instances, "show", instances_show, "everything about one instance").add_argument("name")
    for name in ("start", "stop", "restart"):
        driven = verb(instances, name, instances_verb, f"{name} an instance")
        driven.add_argument("name")
        driven.set_defaults(verb=name)
    verb(instances, "delete", instances_delete, "stop an instance and forget it").add_argument("name")
    logged = verb(instances, "logs", instances_logs, "the last lines of a replica's log")
    logged.add_argument("name")
    logged.add_argument("--replica", type=int, default=0)
    logged.add_argument("--lines", type=int, default=100)
    return top


SETTING_FLAGS = ("api_port", "grpc_port", "http_port", "bind", "data_dir")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.config:
        os.environ[configfile.CONFIG_VARIABLE] = os.path.abspath(given.config)
    try:
        settings = configfile.load(os.environ, {key: getattr(given, key, None) for key in SETTING_FLAGS})
        status: int = given.run(given, settings)
        return status
    except Problem as problem:
        print(f"appliance: {problem.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
