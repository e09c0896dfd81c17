"""`appliance models`: list, download with visible progress, verify, export and import models."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.command import with_control
from appliance.cli.terminal import (
    clear_progress_bar,
    job_progress_bar,
    progress_bar,
    say,
    say_all,
    say_json,
    size,
    table,
)
from appliance.core.problems import invalid
from appliance.core.settings import Settings

if TYPE_CHECKING:
    from appliance.cli.control_client import ControlClient
    from appliance.node.context import Node

MODEL_COLUMNS = ("model_id", "status", "source", "size", "task", "last_verified")
POLL_SECS = 0.3


def table_row(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "size": size(model["cache_size_bytes"]), "task": (model["metadata"] or {}).get("task")}


def show(arguments: argparse.Namespace, models: list[dict[str, Any]] | dict[str, Any]) -> None:
    """As JSON a list or a single object, as the API answered; else as a table."""
    if arguments.json:
        say_json(models)
    else:
        say(table([table_row(model) for model in (models if isinstance(models, list) else [models])], MODEL_COLUMNS))


@with_control
def list_models(arguments: argparse.Namespace, control: ControlClient) -> int:
    listed = control.models()
    if arguments.names:
        say_all(each["model_id"] for each in listed)
    else:
        show(arguments, listed)
    return 0


@with_control
def show_model(arguments: argparse.Namespace, control: ControlClient) -> int:
    model = control.model(arguments.model_id)
    if arguments.json:
        say_json(model)
        return 0
    for key, value in model.items():
        if key == "files":
            for file in value:
                say(f"  {file['name']}  {size(file['size'])}  {file['sha256'] or 'not summed up yet'}")
        elif value is not None:
            say(f"{key}: {in_words(value)}")
    return 0


def in_words(value: Any) -> str:
    """A value of a model for people: an object as its fields, and what is not known is not said."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(in_words, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


@with_control
def add_model(arguments: argparse.Namespace, control: ControlClient) -> int:
    show(arguments, control.add_model(arguments.model_id, arguments.revision))
    return 0


@with_control
def download(arguments: argparse.Namespace, control: ControlClient) -> int:
    if bool(arguments.model_id) == arguments.all:
        raise invalid("Give the id of a model, or --all for those of the configuration file")
    model_ids = arguments.settings.models if arguments.all else [arguments.model_id]
    models, known = [], {model["model_id"] for model in control.models()}
    for model_id in model_ids:
        control.add_model(model_id, None if arguments.all else arguments.revision)
        models.append(follow_job(control, control.model(model_id, "download", "POST", wait="false")))
    show(arguments, models)
    for model in models:
        if model["download_error"]:
            if model["model_id"] not in known and not model["cache_path"]:  # it may be a slip of the pen
                control.model(model["model_id"], "", "DELETE", keep_files="true")
            raise invalid(model["download_error"])
    return 0


def follow_job(control: ControlClient, model: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of the model's job. Returns the model as it is when the job has ended."""
    while model["status"] in ("downloading", "loading"):
        job_progress_bar(model["progress"] or {})
        time.sleep(POLL_SECS)
        model = control.model(model["model_id"])
    clear_progress_bar()
    return model


@with_control
def load(arguments: argparse.Namespace, control: ControlClient) -> int:
    fields = {"pooling": arguments.pooling, "dtype": arguments.dtype}
    body = {key: value for key, value in fields.items() if value is not None}
    before = control.model(arguments.model_id)
    model = follow_job(control, control.model(arguments.model_id, "load", "POST", body, wait="false"))
    show(arguments, model)
    if model["status"] == "verified" and model["last_verified"] == before["last_verified"]:
        raise invalid("It was cancelled: what is shown is what was known before")
    if model["status"] != "verified":
        raise invalid(model["verification_error"] or f"It is {model['status']}")
    return 0


@with_control
def cancel(arguments: argparse.Namespace, control: ControlClient) -> int:
    show(arguments, control.model(arguments.model_id, "cancel", "POST"))
    return 0


@with_control
def delete(arguments: argparse.Namespace, control: ControlClient) -> int:
    show(
        arguments,
        control.model(arguments.model_id, "", "DELETE", keep_files="true" if arguments.keep_files else "false"),
    )
    return 0


def export_model(arguments: argparse.Namespace, settings: Settings) -> int:
    """Write a model of the running appliance's cache into a file of the caller."""
    from appliance.cli.folder_control import control_of_folder
    from appliance.drivers import archive
    from appliance.operations import model_archives

    control, target = control_of_folder(settings), Path(arguments.file)
    if control:
        with control.export_model(arguments.model_id) as (total, parts):
            archive.write(target, parts, total, progress_bar)
    else:
        total, parts = model_archives.export(stopped_node(settings), arguments.model_id)
        archive.write(target, parts, total, progress_bar)
    clear_progress_bar()
    files = archive.contents(target)["files"]
    say(f"{arguments.file}: {len(files)} files of {arguments.model_id}, {size(sum(file['size'] for file in files))}")
    return 0


def import_model(arguments: argparse.Namespace, settings: Settings) -> int:
    """Take a model into the running appliance's cache, out of a file that the caller can read."""
    from appliance.cli.folder_control import control_of_folder
    from appliance.operations import model_archives

    control = control_of_folder(settings)
    try:
        with Path(arguments.file).open("rb") as opened:
            if control:
                model = control.import_model(opened, arguments.as_id)
            else:
                node = stopped_node(settings)
                model = model_archives.take_in(node, opened, arguments.file, arguments.as_id, progress_bar).mapping()
    except OSError as error:
        raise invalid(f"Cannot read {arguments.file}: {error.strerror}", "IMPORT_FAILED") from error
    clear_progress_bar()
    show(arguments, model)
    return 0


def stopped_node(settings: Settings) -> Node:
    """The appliance of a folder where nothing runs. Raises: Problem when the folder is another user's."""
    from appliance.node.context import Node

    folder = Path(settings.data_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise invalid(f"The appliance of {folder} runs as another user, with a model cache of its own: start it first")
    return Node.at(settings)


def add_parsers(verbs: Any, add_command: Any) -> None:
    """Add the commands of this module."""
    group = verbs.add_parser("models", help="know, fetch and verify models")
    models = group.add_subparsers(metavar="VERB", required=True)
    listed = add_command(models, "list", list_models, "all models that were added or are on this machine")
    listed.add_argument("--names", action="store_true", help="only their ids, one a line")
    add_command(models, "show", show_model, "everything about one model").add_argument("model_id")
    added = add_command(models, "add", add_model, "register a model")
    added.add_argument("model_id")
    fetched = add_command(models, "download", download, "fetch a model, and wait for it")
    fetched.add_argument("model_id", nargs="?")
    fetched.add_argument("--all", action="store_true", help="those that the configuration file names")
    for parser in (added, fetched):
        parser.add_argument("--revision", help="branch, tag or commit; it stays pinned")
    for name in ("load", "verify"):
        loaded = add_command(models, name, load, "compare every digest, start the model once and ask it")
        loaded.add_argument("model_id")
        loaded.add_argument("--pooling", choices=("cls", "mean", "splade", "last-token"))
        loaded.add_argument("--dtype", choices=("float16", "float32", "bfloat16", "int8"))
    add_command(models, "cancel", cancel, "end a download or load").add_argument("model_id")
    deleted = add_command(models, "delete", delete, "forget a model and delete its files from the cache")
    deleted.add_argument("model_id")
    deleted.add_argument("--keep-files", action="store_true")
    exported = add_command(models, "export", export_model, "write a model into one file, for a machine without a hub")
    exported.add_argument("model_id")
    exported.add_argument("file")
    imported = add_command(models, "import", import_model, "take a model out of such a file")
    imported.add_argument("file")
    imported.add_argument("--as", dest="as_id", metavar="ID", help="another id, for what was a folder")
