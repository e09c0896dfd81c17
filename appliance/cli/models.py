"""`appliance models`: what is on the machine, fetching it with visible progress, proving it, carrying it elsewhere."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from appliance.cli.client import Control, remote
from appliance.cli.reaching import running
from appliance.cli.terminal import bar, bar_ends, say, say_json, size, table
from appliance.core.problems import invalid
from appliance.core.settings import Settings
from appliance.drivers import archive
from appliance.node.context import Node
from appliance.operations import model_archives

COLUMNS = ("model_id", "status", "source", "size", "task", "last_verified")
POLL_SECS = 0.3


def row(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "size": size(found["cache_size_bytes"]), "task": (found["metadata"] or {}).get("task")}


def show(given: argparse.Namespace, found: Any) -> None:
    if given.json:
        say_json(found)
    else:
        say(table([row(each) for each in (found if isinstance(found, list) else [found])], COLUMNS))


@remote
def listed(given: argparse.Namespace, control: Control) -> int:
    show(given, control.models())
    return 0


@remote
def one(given: argparse.Namespace, control: Control) -> int:
    found = control.model(given.model_id)
    if given.json:
        say_json(found)
        return 0
    for key, value in found.items():
        if key == "files":
            for file in value:
                say(f"  {file['name']}  {size(file['size'])}  {file['sha256'] or 'not summed up yet'}")
        else:
            say(f"{key}: {value}")
    return 0


@remote
def add_model(given: argparse.Namespace, control: Control) -> int:
    show(given, control.add_model(given.model_id, given.revision))
    return 0


@remote
def download(given: argparse.Namespace, control: Control) -> int:
    if bool(given.model_id) == given.all:
        raise invalid("Give the id of a model, or --all for those of the configuration file")
    wanted = given.settings.models if given.all else [given.model_id]
    found = []
    for model_id in wanted:
        control.add_model(model_id, None if given.all else given.revision)
        found.append(followed(control, control.model(model_id, "download", "POST", wait="false")))
    show(given, found)
    for each in found:
        if each["download_error"]:
            raise invalid(each["download_error"])
    return 0


def followed(control: Control, found: dict[str, Any]) -> dict[str, Any]:
    """The model when its job has ended, with its progress on the way."""
    while found["status"] in ("downloading", "loading"):
        told = found["progress"] or {}
        left = f", {told['eta_secs']:.0f} s left" if told.get("eta_secs") else ""
        rate = f" {size(told['bytes_per_sec'])}/s" if told.get("bytes_per_sec") else ""
        bar(told.get("bytes_done") or 0, told.get("bytes_total"), f"{told.get('step', '')}{rate}{left}")
        time.sleep(POLL_SECS)
        found = control.model(found["model_id"])
    bar_ends()
    return found


@remote
def load(given: argparse.Namespace, control: Control) -> int:
    fields = {"pooling": given.pooling, "dtype": given.dtype}
    body = {key: value for key, value in fields.items() if value is not None}
    found = followed(control, control.model(given.model_id, "load", "POST", body, wait="false"))
    show(given, found)
    if found["status"] != "verified":
        raise invalid(found["verification_error"] or f"It is {found['status']}")
    return 0


@remote
def cancel(given: argparse.Namespace, control: Control) -> int:
    show(given, control.model(given.model_id, "cancel", "POST"))
    return 0


@remote
def delete(given: argparse.Namespace, control: Control) -> int:
    show(given, control.model(given.model_id, "", "DELETE", keep_files="true" if given.keep_files else "false"))
    return 0


def export(given: argparse.Namespace, settings: Settings) -> int:
    """Out of the cache of the appliance that runs, into a file of whoever asks."""
    control, target = running(settings), Path(given.file)
    if control:
        with control.archive(given.model_id) as (total, parts):
            archive.write(target, parts, total, bar)
    else:
        total, parts = model_archives.export(alone(settings), given.model_id)
        archive.write(target, parts, total, bar)
    bar_ends()
    files = archive.contents(target)["files"]
    say(f"{given.file}: {len(files)} files of {given.model_id}, {size(sum(file['size'] for file in files))}")
    return 0


def take_in(given: argparse.Namespace, settings: Settings) -> int:
    """Into the cache of the appliance that runs, out of a file that whoever asks can read."""
    control = running(settings)
    try:
        with Path(given.file).open("rb") as opened:
            if control:
                found = control.take_in(opened, given.as_id)
            else:
                found = model_archives.take_in(alone(settings), opened, given.file, given.as_id, bar)
    except OSError as error:
        raise invalid(f"Cannot read {given.file}: {error.strerror}", "IMPORT_FAILED") from error
    bar_ends()
    show(given, found)
    return 0


def alone(settings: Settings) -> Node:
    """The appliance of a folder where nothing runs. Raises: Problem when it is somebody else's."""
    folder = Path(settings.data_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise invalid(f"The appliance of {folder} runs as another user, with a model cache of its own: start it first")
    return Node.at(settings)


def add(verbs: Any, verb: Any) -> None:
    """The parsers of this module."""
    group = verbs.add_parser("models", help="know, fetch and verify models")
    models = group.add_subparsers(metavar="VERB", required=True)
    verb(models, "list", listed, "all models that were added or are on this machine")
    verb(models, "show", one, "everything about one model").add_argument("model_id")
    added = verb(models, "add", add_model, "register a model")
    added.add_argument("model_id")
    fetched = verb(models, "download", download, "fetch a model, and wait for it")
    fetched.add_argument("model_id", nargs="?")
    fetched.add_argument("--all", action="store_true", help="those that the configuration file names")
    for parser in (added, fetched):
        parser.add_argument("--revision", help="branch, tag or commit; it stays pinned")
    for name in ("load", "verify"):
        loaded = verb(models, name, load, "compare every digest, start the model once and ask it")
        loaded.add_argument("model_id")
        loaded.add_argument("--pooling", choices=("cls", "mean", "splade", "last-token"))
        loaded.add_argument("--dtype", choices=("float16", "float32", "bfloat16"))
    verb(models, "cancel", cancel, "end a download or load").add_argument("model_id")
    deleted = verb(models, "delete", delete, "forget a model and delete its files from the cache")
    deleted.add_argument("model_id")
    deleted.add_argument("--keep-files", action="store_true")
    exported = verb(models, "export", export, "write a model into one file, for a machine without a hub")
    exported.add_argument("model_id")
    exported.add_argument("file")
    imported = verb(models, "import", take_in, "take a model out of such a file")
    imported.add_argument("file")
    imported.add_argument("--as", dest="as_id", metavar="ID", help="another id, for what was a folder")
