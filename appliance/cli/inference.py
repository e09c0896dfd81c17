"""`appliance embed`, `rerank` and `bench`: inference from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.command import with_control
from appliance.cli.connection import Identity
from appliance.cli.instances import named_or_only
from appliance.cli.terminal import say, say_json, table
from appliance.core.addresses import address
from appliance.core.problems import invalid
from appliance.core.settings import Settings

if TYPE_CHECKING:
    from appliance.cli.bench import Options
    from appliance.cli.control_client import ControlClient
    from appliance.core.benchmark import LoadStep

SHOWN_CHARACTERS = 80  # of a text in a table


def read_lines(file: str) -> list[str]:
    """The lines of a file, or of standard input for `-`, without empty ones at the end.

    Raises: Problem, also for an empty line between others: it has no vector and no rank.
    """
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"Cannot read {file}: {error}") from error
    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        raise invalid(f"{file} has no text")
    if "" in lines:
        raise invalid(
            f"Line {lines.index('') + 1} of {file} is empty, and an empty text has no vector: remove the line"
        )
    return lines


def endpoint(settings: Settings) -> str:
    return address(settings.bind, settings.grpc_port)


@with_control
def embed(arguments: argparse.Namespace, control: ControlClient) -> int:
    """One text: its vector. A file: one vector a line, in the order of its lines."""
    from appliance.cli.multiplexer_client import MultiplexerClient
    from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

    if (arguments.text is None) == (arguments.file is None):
        raise invalid("Give a text, or --file FILE with one text a line (- is standard input)")
    target = Target(instance_name=named_or_only(control, arguments.instance))
    multiplexer = MultiplexerClient.from_settings(arguments.settings)
    if arguments.text is not None:
        say(json.dumps(multiplexer.embed(arguments.text, target)))
        return 0
    for vector in multiplexer.embed_all(read_lines(arguments.file), target):
        say(json.dumps(vector))
    return 0


@with_control
def rerank(arguments: argparse.Namespace, control: ControlClient) -> int:
    """The texts of a file, best first."""
    from appliance.cli.multiplexer_client import MultiplexerClient
    from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

    texts = read_lines(arguments.file)
    target = Target(instance_name=named_or_only(control, arguments.instance))
    ranked = MultiplexerClient.from_settings(arguments.settings).rerank(arguments.query, texts, target)
    rows = [{"score": round(score, 6), "index": place, "text": texts[place]} for place, score in ranked]
    if arguments.json:
        say_json(rows)
    else:
        shown = [{**row, "text": str(row["text"])[:SHOWN_CHARACTERS]} for row in rows]
        say(table(shown, ("score", "index", "text")))
    return 0


def bench(arguments: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli import bench as benchmark  # it imports pyarrow, which no other command needs

    given = {key: getattr(arguments, key, None) for key in benchmark.Options.__dataclass_fields__}
    given["endpoint"] = arguments.endpoint or endpoint(settings)
    chosen = (arguments.endpoint, arguments.ca, arguments.cert, arguments.key, arguments.insecure)
    if settings.tls.on and not any(chosen):
        given["security"] = Identity.from_environment(settings).channel_security()
    if arguments.mode == "standard" and arguments.concurrency is None:
        given["concurrency"] = arguments.batch_size  # there is no batch: so many requests are in flight
    options = benchmark.Options(**{key: value for key, value in given.items() if value is not None})
    if arguments.sweep:
        return sweep(arguments, options)
    if arguments.quality:
        return quality(arguments, options)
    report, samples = benchmark.run(options, benchmark.show_progress)
    as_json = arguments.json or not sys.stdout.isatty()
    say(json.dumps(asdict(report), indent=2) if as_json else "\n".join(benchmark.report_lines(report)))
    if arguments.plot:
        benchmark.plot(report, samples, arguments.plot)
    return 1 if report.failed else 0


def sweep(arguments: argparse.Namespace, options: Options) -> int:
    """With --json a line for each step, as it ends."""
    from appliance.cli import sweep as sweeping
    from appliance.core.benchmark import saturation

    def hear(step: LoadStep) -> None:
        say(json.dumps(step.mapping()) if arguments.json else sweeping.line(step))

    steps = sweeping.sweep(options, arguments.secs, hear)
    if not arguments.json and (best := saturation(steps)):
        say(f"saturated with {best} in flight: more of them wait longer for the same")
    return 1 if any(step.failed for step in steps) else 0


def quality(arguments: argparse.Namespace, options: Options) -> int:
    from appliance.cli import quality as formats

    measured = formats.measure_formats(options)
    if arguments.json:
        say(json.dumps([each._asdict() for each in measured], indent=2))
    else:
        say(table([each.row() for each in measured], formats.COLUMNS))
    return 0


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    embedded = add_command(verbs, "embed", embed, "print the vector of a text, or of each line of a file")
    embedded.add_argument("text", nargs="?")
    embedded.add_argument("--file", metavar="FILE", help="one text a line; - is standard input")
    embedded.add_argument("--instance", help="instance name; not needed while there is only one")
    ranked = add_command(verbs, "rerank", rerank, "rank the lines of a file by how well they answer a query")
    ranked.add_argument("query")
    ranked.add_argument("file", help="one text a line; - is standard input")
    ranked.add_argument("--instance", help="instance name; not needed while there is only one")
    measured = add_command(verbs, "bench", bench, "measure how fast an instance answers")
    measured.add_argument(
        "-e", "--endpoint", help="host:port, or its URL with http or https; default: that of this configuration"
    )
    measured.add_argument("-i", "--instance", required=True)
    measured.add_argument("-m", "--mode", choices=("standard", "stream", "arrow"), default="standard")
    measured.add_argument("-n", "--num-texts", type=int, default=1000)
    measured.add_argument(
        "-b",
        "--batch-size",
        type=int,
        help="texts of one stream or Arrow batch (100); in standard mode the requests in flight",
    )
    measured.add_argument("--concurrency", type=int, help="requests in flight (8)")
    measured.add_argument("--texts", help="file with one text a line")
    measured.add_argument("--noop", action="store_true", help="arrow only: answered without any instance")
    for flag in ("cert", "key", "ca"):
        measured.add_argument(f"--{flag}", help="PEM file")
    measured.add_argument("--insecure", action="store_true", help="trust whatever certificate the server shows")
    measured.add_argument("--max-message-size-mb", type=int, help="largest message, both ways (2047)")
    measured.add_argument("--sweep", action="store_true", help="measure with 1, 2, 4 … 64 requests in flight")
    measured.add_argument(
        "--quality", action="store_true", help="what smaller vectors cost: nDCG@10 for each output dtype and width"
    )
    measured.add_argument("--secs", type=float, default=2.0, help="of each step of a sweep (2)")
    measured.add_argument("--plot", metavar="FILE.png", help="draw throughput and latency")
