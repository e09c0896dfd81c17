"""`appliance run MODEL`: from the name of a model to its first answer in one step."""

from __future__ import annotations

import argparse
import os
import re
import time
from typing import TYPE_CHECKING, Any

from appliance.cli.command import with_control
from appliance.cli.instances import FIELD_NAMES, parse_field, wait_while_starting
from appliance.cli.terminal import say, say_json
from appliance.core.instance import InstanceSpec
from appliance.core.instance import name as valid_name
from appliance.core.problems import Kind, Problem, invalid
from appliance.node.servable import vectors_of

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient
    from appliance.cli.multiplexer_client import MultiplexerClient

TEXT = "hello world"
QUERY, TEXTS = "what do pandas eat?", ("bamboo", "pandas eat bamboo most of the day", "the moon")


@with_control
def run(arguments: argparse.Namespace, control: ControlClient) -> int:
    """Create the instance unless it is there, wait until it answers, and show its first answer."""
    from appliance.cli.multiplexer_client import MultiplexerClient

    began = time.monotonic()
    model_id = arguments.model_id
    if model_id.startswith((".", "~")):  # a folder of the caller's, who may be elsewhere than the appliance
        model_id = os.path.abspath(os.path.expanduser(model_id))
    name = arguments.name or name_for(model_id)
    fields = {"name": name, "model_id": model_id, **dict(map(parse_field, arguments.set or []))}
    existing = next((each for each in control.instances() if each["name"] == name), None)
    if existing is None:
        control.create(fields)
    elif unknown := sorted(fields.keys() - existing.keys()):
        raise invalid(f'An instance has no field "{unknown[0]}"')
    elif other := [key for key, value in fields.items() if existing[key] != value]:
        raise invalid(
            f'Instance "{name}" has {other[0]} {existing[other[0]]}: choose another name with --name, or delete it'
        )
    elif existing["status"] in ("stopped", "stopping", "failed"):
        start(control, name)
    if control.instance(name)["status"] == "sleeping":
        control.instance(name, "wake", "POST")
    instance = wait_while_starting(control, name)
    if instance["status"] != "running":
        raise Problem(Kind.UNAVAILABLE, "NOT_RUNNING", f'"{name}" is {instance["status"]}: {instance["last_error"]}')
    waited = time.monotonic() - began
    kept = {key: instance[key] for key in ("name", "model_id", "revision", "pooling", "extra_args")}
    vectors = vectors_of(InstanceSpec.parse({key: value for key, value in kept.items() if value is not None}))
    answer = first_answer(MultiplexerClient.from_settings(arguments.settings), name, vectors)
    if arguments.json:
        say_json({"name": name, "seconds": round(waited, 3), "instance": instance, "answer": answer})
    else:
        say(f"{name} serves {model_id} after {waited:.1f} s")
        say(f"  {answer}")
        say(f"Next: appliance {'rerank QUERY FILE' if ' ranks first ' in answer else 'embed TEXT'} --instance {name}")
    return 0


def start(control: ControlClient, name: str) -> None:
    """Let an instance run; one that is being restarted does by itself."""
    try:
        control.instance(name, "start", "POST")
    except Problem as problem:
        if problem.code != "ALREADY_RUNNING":
            raise


def name_for(model_id: str) -> str:
    """The last part of an id or a path, as the name of an instance."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", model_id.rstrip("/").rpartition("/")[2])[:60]
    try:
        valid_name(name)
    except ValueError:
        return f"m-{name}"
    return name


def first_answer(multiplexer: MultiplexerClient, name: str, vectors: str) -> str:
    """One call that fits the model, and what came back, in words. vectors: see `servable.vectors_of`."""
    from appliance.wire.tei.v1 import tei_pb2 as tei
    from appliance.wire.tei_multiplexer.v1.multiplexer_pb2 import Target

    target = Target(instance_name=name)
    kind = multiplexer.info(target).model_type
    if kind == tei.MODEL_TYPE_RERANKER:
        best = multiplexer.rerank(QUERY, TEXTS, target)[0]
        return f'"{TEXTS[best.place]}" ranks first for "{QUERY}", with score {best.score:.4f}'
    if kind == tei.MODEL_TYPE_CLASSIFIER:
        best_label = multiplexer.predict(TEXT, target)[0]
        return f'"{TEXT}" is {best_label.label}, with score {best_label.score:.4f}'
    if vectors == "tokens":
        return f'"{TEXT}" has {multiplexer.count_tokens(TEXT, target)} token vectors'
    if vectors == "sparse":
        return f'"{TEXT}" has {multiplexer.count_sparse(TEXT, target)} weighted tokens'
    vector = multiplexer.embed(TEXT, target)
    numbers = ", ".join(f"{number:.4f}" for number in vector[:4])
    return f'"{TEXT}" is [{numbers}, ...], {len(vector)} numbers'


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the command of this module."""
    one = add_command(verbs, "run", run, "download a model, verify it, serve it, and show its first answer")
    one.add_argument("model_id", help="hub id, or the path of a folder")
    one.add_argument("--name", help="of the instance; default: the last part of the model's id")
    one.add_argument("--set", action="append", metavar="FIELD=VALUE", help=f"any other field: {FIELD_NAMES}")
