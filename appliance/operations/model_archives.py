"""Models for machines without a hub: out of one machine in a file, and into the cache of another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock

from appliance.core import models as registry
from appliance.core.events import Event
from appliance.core.models import Model, Models
from appliance.core.problems import Problem, invalid, quoted
from appliance.core.views import ModelView
from appliance.drivers import archive, hub, manifests, modelfiles
from appliance.drivers.archive import Watch
from appliance.drivers.manifests import Manifest
from appliance.node import model_overview
from appliance.node.context import Node, now
from appliance.operations import supply
from appliance.operations.models import files_held, refuse_used

UNPACKED = ".import-"


class Export(NamedTuple):
    """An archive: its length in bytes, and its parts."""

    length: int
    parts: Iterator[bytes]


def export(node: Node, model_id: str) -> Export:
    """A model and its manifest as one archive.

    Raises: Problem unless it was downloaded or verified here; its parts raise one when a file has changed since.
    """
    model = model_overview.require(node, model_id)
    place = hub.locate(model_id, model.revision or None)
    manifest = model_overview.manifest_of(node, model_id, model.revision, place)
    if place is None or manifest is None:
        raise invalid(f"Model {quoted(model_id)} has no manifest yet: download it, or load it, first", "EXPORT_FAILED")
    for change in manifests.changes(manifest, place.folder):
        if change.certain:
            raise invalid(f"{quoted(change.name)} {change.why}: verify the model", "MODEL_CHANGED")
    files = [{"name": entry.name, "size": entry.size, "sha256": entry.sha256} for entry in manifest.files]
    about = {"model_id": model_id, "revision": model.revision, "commit": manifest.commit, "files": files}
    return Export(archive.length(about), archive.chunks(about, place.folder))


def served(node: Node, names: Collection[str], source: str) -> list[str]:
    """Of an archive what a download would fetch: no code, and no pickle unless that is allowed. Raises: Problem."""
    try:
        return registry.needed(names, node.settings.allow_pickle)
    except Problem as problem:
        raise invalid(f"{source} is refused: {problem.message}. Nothing was imported", problem.code) from None


@contextmanager
def unpacking() -> Iterator[Path]:
    """A folder beside the models, which is away afterwards; if this process is killed, at the next start of a control.

    Raises: OSError.
    """
    cache = hub.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=UNPACKED, dir=cache))
    with FileLock(lock_of(room)):
        try:
            yield room
        finally:
            remove(room)


def remove_abandoned() -> None:
    """What killed processes have unpacked: a lock of a process ends with it."""
    for room in hub.cache_folder().glob(f"{UNPACKED}*/"):
        with suppress(OSError), FileLock(lock_of(room), timeout=0):  # a Timeout is an OSError
            remove(room)


def lock_of(room: Path) -> Path:
    return room.with_name(f"{room.name}.lock")


def remove(room: Path) -> None:
    shutil.rmtree(room, ignore_errors=True)
    lock_of(room).unlink(missing_ok=True)


def refuse_another_revision(registered: Model, model: Model, source: str) -> None:
    """Files of no revision would not be found under the one that is registered. Raises: Problem."""
    if registered.revision != model.revision:
        name, revision = quoted(model.model_id), quoted(registered.revision)
        words = f"{source} is of no revision, and {name} is registered at revision {revision}: delete the model first"
        raise invalid(f"{words}. Nothing was imported", "IMPORT_FAILED")


def refuse_other_files(node: Node, model: Model, sums: Mapping[str, str]) -> None:
    """Raises: Problem MODEL_IN_USE where an instance has the model with other files; one that waits for files may come.

    sums: SHA-256 by name.
    """
    place = hub.locate(model.model_id, model.revision or None)
    if place is None or modelfiles.missing(place.folder):
        return
    manifest = model_overview.manifest_of(node, model.model_id, model.revision, place)
    if manifest is None or {entry.name: entry.sha256 for entry in manifest.files} != sums:
        refuse_used(node, model.model_id)


def imported(before: Models, model: Model, now: str) -> Models:
    """The registry with a model whose files have come. Raises: Problem MODEL_BUSY."""
    after = registry.add(before, model, now)
    present = after.get(model.model_id)
    registry.refuse_busy(present)
    return registry.with_model(after, replace(present, download_error=""))


def take_in(node: Node, opened: IO[bytes], source: str, as_id: str | None, watch: Watch) -> ModelView:
    """Put a model of an archive into the hub's cache, where TEI and the engine find it by its id, and register it.

    source: how the archive is called in messages. as_id: the id that a model gets which was a folder elsewhere.
    Raises: Problem; then it is not registered.
    """
    try:
        with unpacking() as room:
            about = archive.read(opened, source, room, watch)
            model = registry.parse(
                {"model_id": as_id or about.get("model_id"), "revision": about.get("revision") or None}
            )
            commit = str(about.get("commit", ""))
            if hub.COMMIT.fullmatch(model.revision) and commit != model.revision:
                words = f"its revision is the commit {model.revision}, and its files are of {quoted(commit)}"
                raise archive.damaged(source, words)
            if model.model_id.startswith("/"):
                raise invalid(f"{source} holds a folder: give it the id of a model with --as org/name", "IMPORT_FAILED")
            if lacking := modelfiles.missing(room):
                words = f"{source} is refused: {lacking[0]} is missing in it. Nothing was imported"
                raise invalid(words, "IMPORT_FAILED")
            listed = {str(file["name"]): str(file["sha256"]) for file in about["files"]}
            sums = {name: listed[name] for name in served(node, listed, source)}
            registered = partial(imported, model=model, now=now())
            with files_held(node):
                # Refused before anything is installed.
                refuse_another_revision(registered(node.models.read()).get(model.model_id), model, source)
                refuse_other_files(node, model, sums)
                installed = hub.install(model.model_id, model.revision or "main", commit, room, sums)
                node.models.update(registered)
                entries = tuple(manifests.entry_of(installed.folder, name, sums[name]) for name in sorted(sums))
                manifest = Manifest(model.model_id, model.revision, installed.commit, entries, ())
                manifests.keep(node.layout, manifest)
    except OSError as error:
        raise archive.not_stored(source, error) from error
    node.journal.record(
        Event.MODEL_IMPORTED, None, f"Model {model.model_id} imported from {source}", model=model.model_id
    )
    if node.supervisor.answers():
        supply.supplied(node, model.model_id)
    return model_overview.show(node, model.model_id)
