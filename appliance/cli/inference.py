"""`appliance embed`, `rerank` and `bench`: the multiplexer from a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.cli.client import Control, Multiplexer, remote
from appliance.cli.instances import only
from appliance.cli.terminal import say, say_json, table
from appliance.core.problems import invalid
from appliance.core.settings import Settings, address
from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

SHOWN = 80  # characters of a text in a table


def lines_of(file: str) -> list[str]:
    """The lines of a file, or of standard input for `-`, without empty ones at the end. Raises: Problem."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"Cannot read {file}: {error}") from error
    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        raise invalid(f"{file} has no text")
    return lines


def endpoint(settings: Settings) -> str:
    return address(settings.bind, settings.grpc_port)


@remote
def embed(given: argparse.Namespace, control: Control) -> int:
    """One text: its vector. A file: one vector a line, in the order of its lines."""
    if (given.text is None) == (given.file is None):
        raise invalid("Give a text, or --file FILE with one text a line (- is standard input)")
    target = Target(instance_name=only(control, given.instance))
    multiplexer = Multiplexer.of(given.settings)
    if given.text is not None:
        say(json.dumps(multiplexer.embed(given.text, target)))
        return 0
    for vector in multiplexer.embed_all(lines_of(given.file), target):
        say(json.dumps(vector))
    return 0


@remote
def rerank(given: argparse.Namespace, control: Control) -> int:
    """The texts of a file, best first."""
    texts = lines_of(given.file)
    target = Target(instance_name=only(control, given.instance))
    ranked = Multiplexer.of(given.settings).rerank(given.query, texts, target)
    found = [{"score": round(score, 6), "index": index, "text": texts[index]} for index, score in ranked]
    if given.json:
        say_json(found)
    else:
        say(table([{**each, "text": str(each["text"])[:SHOWN]} for each in found], ("score", "index", "text")))
    return 0


def bench(given: argparse.Namespace, settings: Settings) -> int:
    from appliance.cli import bench as measure  # it imports pyarrow, which no other verb needs

    options = measure.Options(
        endpoint=given.endpoint or endpoint(settings),
        **{key: getattr(given, key) for key in measure.Options.__dataclass_fields__ if key != "endpoint"},
    )
    found, samples = measure.run(options, measure.bar)
    say(json.dumps(asdict(found), indent=2) if given.json else "\n".join(measure.lines(found)))
    if given.plot:
        measure.plot(found, samples, given.plot)
    return 1 if found.failed else 0


def add(verbs: Any, verb: Any) -> None:
    """The parsers of this module."""
    embedded = verb(verbs, "embed", embed, "print the vector of a text, or of each line of a file")
    embedded.add_argument("text", nargs="?")
    embedded.add_argument("--file", metavar="FILE", help="one text a line; - is standard input")
    embedded.add_argument("--instance", help="instance name; not needed while there is only one")
    ranked = verb(verbs, "rerank", rerank, "rank the lines of a file by how well they answer a query")
    ranked.add_argument("query")
    ranked.add_argument("file", help="one text a line; - is standard input")
    ranked.add_argument("--instance", help="instance name; not needed while there is only one")
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
