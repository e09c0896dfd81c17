"""`appliance cache`: what is cached and what that has saved, forgetting it, and computing texts ahead."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from appliance.cli.command import with_control
from appliance.cli.inference import read_lines
from appliance.cli.instances import named_or_only
from appliance.cli.terminal import clear_progress_bar, duration, progress_bar, say, say_json, size, table

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient

WARM_TOGETHER = 256  # texts of one stream


@with_control
def status(arguments: argparse.Namespace, control: ControlClient) -> int:
    cache = control.call("GET", "/cache")
    if arguments.json:
        say_json(cache)
        return 0
    looked_up = cache["hits"] + cache["misses"]
    rate = f", {100 * cache['hits'] / looked_up:.1f} % of {looked_up} texts" if looked_up else ""
    entries = "?" if cache["entries"] is None else cache["entries"]
    say(f"store    {cache['store']}: {entries} entries, {size(cache['size_bytes']) or '?'}")
    say(f"hits     {cache['hits']}{rate}; {cache['joined']} calls waited for another's computation")
    say(f"saved    {duration(cache['saved_secs'])} of computing")
    if cache["failure"]:
        say(f"failure  {cache['failure']}")
    if cache["instances"]:
        say(table(cache["instances"], ("name", "cached", "fingerprint", "why")))
    return 0


@with_control
def clear(arguments: argparse.Namespace, control: ControlClient) -> int:
    which = f"?instance={quote(arguments.instance, safe='')}" if arguments.instance else ""
    answer = control.call("DELETE", f"/cache{which}")
    if arguments.json:
        say_json(answer)
    else:
        say(f"{answer['deleted']} cached embeddings are forgotten")
    return 0


@with_control
def warm(arguments: argparse.Namespace, control: ControlClient) -> int:
    """Every line of a file, so that it is in the cache when it is asked for."""
    from appliance.cli.multiplexer_client import MultiplexerClient
    from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

    lines = read_lines(arguments.file)
    target = Target(instance_name=named_or_only(control, arguments.instance))
    hits = misses = 0
    with MultiplexerClient.from_settings(arguments.settings) as multiplexer:
        for begin in range(0, len(lines), WARM_TOGETHER):
            counts = multiplexer.warm(lines[begin : begin + WARM_TOGETHER], target)
            hits, misses = hits + counts.hits, misses + counts.misses
            if sys.stderr.isatty():
                done = min(len(lines), begin + WARM_TOGETHER)
                progress_bar(done, len(lines), f"texts, {hits} were there", unit=str)
    clear_progress_bar()
    if arguments.json:
        say_json({"texts": len(lines), "hits": hits, "computed": misses})
    else:
        say(f"{len(lines)} texts are in the cache: {hits} were there, {misses} were computed now")
    return 0


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    group = verbs.add_parser("cache", help="embeddings that were computed before")
    cache = group.add_subparsers(metavar="VERB", required=True)
    add_command(cache, "status", status, "what is cached, and what that has saved")
    cleared = add_command(cache, "clear", clear, "forget cached embeddings, all or those of an instance")
    cleared.add_argument("--instance", "-i", help="only what this instance computes, and all that compute the same")
    warmed = add_command(cache, "warm", warm, "compute the lines of a file, so that they are in the cache")
    warmed.add_argument("file", help="one text a line; - is standard input")
    warmed.add_argument("--instance", "-i", help="instance name; not needed while there is only one")
