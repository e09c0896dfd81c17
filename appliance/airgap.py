"""Models for machines without a hub: out of one machine in a file, and into the cache of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from appliance import registry
from appliance.box import Appliance, now
from appliance.core import models
from appliance.core.problems import Problem, invalid, quoted
from appliance.drivers import archive, hub, manifests, modelfiles
from appliance.drivers.archive import Watch
from appliance.drivers.manifests import Manifest


def export(box: Appliance, model_id: str, target: Path, watch: Watch) -> Manifest:
    """Write a model and its manifest into one file. Raises: Problem unless it was downloaded or verified here."""
    model = registry.known(box, model_id)
    place = hub.locate(model_id, model.revision or None)
    manifest = registry.manifest_of(box, model_id, model.revision, place)
    if place is None or manifest is None:
        raise invalid(f"Model {quoted(model_id)} has no manifest yet: download it, or load it, first", "EXPORT_FAILED")
    files = [{"name": entry.name, "size": entry.size, "sha256": entry.sha256} for entry in manifest.files]
    about = {"model_id": model_id, "revision": model.revision, "commit": manifest.commit, "files": files}
    archive.write(target, about, place.folder, watch)
    return manifest


def served(box: Appliance, names: Collection[str], source: Path) -> list[str]:
    """Of an archive what a download would fetch: no code, and no pickle unless that is allowed. Raises: Problem."""
    try:
        return models.needed(names, box.settings.allow_pickle)
    except Problem as problem:
        raise invalid(f"{source} is refused: {problem.message}. Nothing was imported", problem.code) from None


def take_in(box: Appliance, source: Path, as_id: str | None, watch: Watch) -> dict[str, Any]:
    """Put a model of an archive into the hub's cache, where TEI and the engine find it by its id, and register it.

    as_id: the id that a model gets which was a folder elsewhere. Raises: Problem; then nothing is there.
    """
    room = hub.cache_folder() / f".import-{os.getpid()}"
    shutil.rmtree(room, ignore_errors=True)
    try:
        room.mkdir(parents=True)
        about = archive.read(source, room, watch)
        model = models.parse({"model_id": as_id or about.get("model_id"), "revision": about.get("revision") or None})
        if model.model_id.startswith("/"):
            raise invalid(f"{source} holds a folder: give it the id of a model with --as org/name", "IMPORT_FAILED")
        if lacking := modelfiles.missing(room):
            raise invalid(f"{source} is refused: {lacking[0]} is missing in it. Nothing was imported", "IMPORT_FAILED")
        listed = {str(file["name"]): str(file["sha256"]) for file in about["files"]}
        sums = {name: listed[name] for name in served(box, listed, source)}
        box.models.update(lambda known: models.add(known, model, now()))
        commit, snapshot = hub.install(
            model.model_id, model.revision or "main", str(about.get("commit", "")), room, sums
        )
    except OSError as error:
        raise invalid(f"Cannot import {source}: {error}", "IMPORT_FAILED") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)
    entries = tuple(manifests.entry(snapshot, name) for name in sorted(sums))
    path = registry.manifest_path(box, model.model_id, model.revision)
    manifests.write(path, Manifest(model.model_id, model.revision, commit, entries))
    box.journal.record("model_imported", None, f"Model {model.model_id} imported from {source}", model=model.model_id)
    return registry.show(box, model.model_id)
